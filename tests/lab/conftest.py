"""The lab's tests make network namespaces. Without root they fail, and say so; they are never skipped."""

import os

import pytest

from syncline.lab.programs import namespace_names
from syncline.lab.records import all_records, labs_with_host_names


@pytest.fixture(autouse=True)
def _root():
    if os.geteuid() != 0:
        pytest.fail("tests/lab make network namespaces and need root; run them with sudo (they are never skipped)")


@pytest.fixture
def is_gone():
    """Whether nothing is left of a lab: no namespace, no host names, no record."""

    def check(lab_id):
        names = [name for name in namespace_names() if f"-{lab_id}." in name]
        recorded = {record.lab_id for record in all_records()}
        return names == [] and lab_id not in recorded | labs_with_host_names()

    return check
