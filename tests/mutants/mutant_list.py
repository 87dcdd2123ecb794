"""All mutants, in the order of the page that tells of them."""

from fabric_mutants import FABRIC_MUTANTS
from job_mutants import JOB_MUTANTS
from native_mutants import NATIVE_MUTANTS

MUTANTS = FABRIC_MUTANTS + NATIVE_MUTANTS + JOB_MUTANTS
