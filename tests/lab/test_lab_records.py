"""Records of labs: found again, told apart, and abandoned when their owner is dead."""

import dataclasses
import ipaddress
import os
import subprocess

import psutil
import pytest

from syncline.errors import LabError
from syncline.lab.records import all_records, create_record, find_record, remove_incomplete_records
from syncline.topology import Topology

NETWORK = ipaddress.IPv4Network("10.99.0.0/16")


def create(records, *, is_kept=False, topology=None):
    topology = topology or Topology.load("demo-1-3")
    return create_record(
        topology, network=NETWORK, is_kept=is_kept, has_priorities=True, congestion="reno", records=records
    )


def test_a_record_gives_the_same_plan_again(tmp_path):
    topology = Topology.load("two-sites").permuted([7, 6, 5, 4, 3, 2, 1, 0])
    record = create(tmp_path, topology=topology)
    assert all_records(tmp_path) == (record,)
    assert record.plan().topology == topology
    assert record.plan().network == NETWORK
    assert (record.has_priorities, record.is_abandoned, record.owner[0]) == (True, False, os.getpid())
    assert record.congestion == "reno"
    record.remove()
    assert all_records(tmp_path) == ()


def test_a_lab_is_abandoned_when_its_owner_is_dead_or_its_number_is_anothers(tmp_path):
    record = create(tmp_path)
    assert dataclasses.replace(record, owner=(os.getpid(), 1.0)).is_abandoned
    assert dataclasses.replace(record, owner=(2**22 + 1, 1.0)).is_abandoned
    assert not create(tmp_path, is_kept=True).is_abandoned


def test_a_lab_is_abandoned_although_nobody_took_note_of_its_owners_death(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as owner:
        record = dataclasses.replace(create(tmp_path), owner=(owner.pid, psutil.Process(owner.pid).create_time()))
        assert not record.is_abandoned
        owner.kill()
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)  # dead, and not taken note of
        assert record.is_abandoned


def test_finding(tmp_path):
    with pytest.raises(LabError, match="there is no lab; make one with 'syncline lab up TOPOLOGY'"):
        find_record(None, tmp_path)
    one = create(tmp_path)
    assert find_record(None, tmp_path) == find_record(one.lab_id, tmp_path) == one
    two = create(tmp_path)
    with pytest.raises(LabError, match=r"there are several labs .*; say which"):
        find_record(None, tmp_path)
    assert find_record(two.lab_id, tmp_path) == two
    with pytest.raises(LabError, match="there is no lab 'xyz'"):
        find_record("xyz", tmp_path)


def test_a_half_written_record_is_passed_over_and_removed_when_it_is_old(tmp_path):
    half = tmp_path / "aaaaaa"
    half.mkdir()
    (half / "topology.yaml").write_text("host: h\n")
    assert all_records(tmp_path) == ()
    remove_incomplete_records(tmp_path)
    assert half.exists()
    os.utime(half, (1.0, 1.0))
    whole = create(tmp_path)
    os.utime(whole.folder, (1.0, 1.0))
    remove_incomplete_records(tmp_path)
    assert (half.exists(), whole.folder.exists()) == (False, True)
    remove_incomplete_records(tmp_path / "nowhere")


def test_a_folder_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(LabError, match=r"the lab must keep a record, but .* cannot be written"):
        create(file / "records")
