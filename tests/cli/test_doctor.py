"""The doctor: every check ends with a finding, and remedies stand where something is missing."""

import importlib.machinery
import json
import re
import resource
import subprocess
import sys

import pytest
from rich.console import Console

from syncline.cli import doctor
from syncline.cli.doctor import CHECKS, Verdict, judge
from syncline.machines import nvml


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_check_says_what_it_found(check):
    finding = check()
    assert finding.subject
    assert finding.what
    assert bool(finding.remedy) == (finding.verdict is not Verdict.FINE)


def test_an_old_torch_is_no_obstacle_but_a_missing_one_is(monkeypatch):
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "1.9.0")
    assert doctor.check_torch().verdict is Verdict.LIMITED

    def missing(name):
        raise doctor.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", missing)
    assert doctor.check_torch().verdict is Verdict.LACKING
    assert "install torch 2.11 or newer" in doctor.check_torch().remedy


@pytest.mark.parametrize(
    ("version", "verdict", "what"),
    [
        ("2.13.1+cpu", Verdict.FINE, "2.13.1+cpu"),
        ("2.11.0", Verdict.LIMITED, "2.11.0, untested"),
        ("2.14.0", Verdict.FINE, "2.14.0"),
        ("2.15.0", Verdict.LIMITED, "2.15.0, untested"),
        ("2.1.4", Verdict.LIMITED, "2.1.4"),
    ],
)
def test_it_is_said_which_torch_is_tested(monkeypatch, version, verdict, what):
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: version)
    finding = doctor.check_torch()
    assert (finding.verdict, finding.what) == (verdict, what)


def test_of_a_gpu_it_is_said_that_its_paths_are_untested(monkeypatch):
    assert doctor.check_gpu().verdict is Verdict.FINE  # where the tests run there is none
    monkeypatch.setattr(nvml.Gpu, "read_kind", lambda _: {"gpu_hz": 1e9, "gpu_memory_bytes": 80.0 * (1 << 30)})
    finding = doctor.check_gpu()
    assert (finding.verdict, finding.what[:7]) == (Verdict.LIMITED, "80 GiB;")
    assert "never been run on a GPU" in finding.what


def test_few_open_files_are_told_with_the_command(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    finding = doctor.check_open_files()
    assert finding.verdict is Verdict.LIMITED
    assert "ulimit -n 4096" in finding.remedy


def test_an_unlimited_number_of_open_files_is_fine(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert doctor.check_open_files().verdict is Verdict.FINE


def test_missing_tools_are_named(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda tool: None if tool == "tc" else "/sbin/ip")
    finding = doctor.check_lab_tools()
    assert (finding.what, finding.verdict) == ("no tc", Verdict.LIMITED)
    assert "iproute2" in finding.remedy


def test_a_compiled_part_that_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.machinery, "EXTENSION_SUFFIXES", [".none"])
    finding = doctor.check_compiled()
    assert (finding.verdict, finding.what) == (Verdict.LACKING, "missing: no job of several ranks can start")
    assert "pip install --force-reinstall --no-deps ." in finding.remedy


def test_programs_can_read_the_findings():
    command = [sys.executable, "-m", "syncline", "doctor", "--json"]
    findings = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert len(findings) == len(CHECKS)
    assert {"subject", "verdict", "what", "remedy"} == set(findings[0])


def test_a_narrow_terminal_shows_whole_what_is_to_be_copied(monkeypatch):
    setting = "net.ipv4.tcp_slow_start_after_idle=0"
    findings = (judge("congestion control", True, f"cubic; on links with latency {setting} spares", ""),)
    console = Console(record=True, width=40)
    doctor._show_table(findings, console)
    assert setting in re.sub(r"\s", "", console.export_text())
