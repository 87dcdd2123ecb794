"""The names of a lab's hosts are written for it and removed with it."""

import ipaddress
import socket

import pytest

from syncline.errors import LabError
from syncline.lab.plan import plan_lab
from syncline.lab.records import labs_with_host_names, remove_host_names, write_host_names
from syncline.topology import Topology


def plan(lab_id):
    return plan_lab(Topology.flat(2), lab_id=lab_id, network=ipaddress.IPv4Network("10.99.0.0/16"))


def test_names_are_written_and_removed(tmp_path):
    folder = tmp_path / "netns"
    write_host_names(plan("aaaaaa"), folder)
    write_host_names(plan("bbbbbb"), folder)
    assert (folder / "syncline-aaaaaa.h1/hosts").read_text().splitlines() == [
        "127.0.0.1 localhost",
        "::1 localhost",
        "10.99.0.1 h0",
        "::ffff:10.99.0.1 h0.lab",
        f"10.99.0.2 h1 {socket.gethostname()}",
        "::ffff:10.99.0.2 h1.lab",
    ]
    assert labs_with_host_names(folder) == {"aaaaaa", "bbbbbb"}
    remove_host_names("aaaaaa", folder)
    assert labs_with_host_names(folder) == {"bbbbbb"}
    (folder / "of-somebody-else").mkdir()
    remove_host_names("bbbbbb", folder)
    assert [place.name for place in folder.iterdir()] == ["of-somebody-else"]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match=r"writes the names of its hosts to .*, but cannot \(Not a directory\)"):
        write_host_names(plan("aaaaaa"), tmp_path / "file")
