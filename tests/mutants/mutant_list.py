"""All mutants, in the order of the page that tells of them."""

from fabric_mutants import FABRIC_MUTANTS
from job_mutants import JOB_MUTANTS

MUTANTS = FABRIC_MUTANTS + JOB_MUTANTS
