"""What the launcher starts again, on real processes: tiny scripts without torch, no test that waits by the clock."""

import json
import os
import signal
import subprocess
import sys

import pytest
from launched_scripts import TWO_HOSTS, start
from typer.testing import CliRunner

from syncline.cli.launcher.environment import Elasticity
from syncline.cli.launcher.supervisor import Limits, RestartLimits
from syncline.cli.run import app
from syncline.errors import ConfigurationError

DEADLINE_S = 60.0
AGAIN = RestartLimits(count=2, first_pause_s=0.01)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SYNCLINE_")]:
        monkeypatch.delenv(name)


def test_a_job_that_fails_is_started_again_and_the_summary_says_why():
    code, out, error = start(
        """
        if attempt == 0 and os.environ["RANK"] == "1": os.kill(os.getpid(), 9)
        if attempt == 1 and os.environ["RANK"] == "0": sys.exit(3)
        if attempt == 2: print("done as", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
        """,
        restarts=AGAIN,
    )
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] done as 0 of 2", "[1] done as 1 of 2"]
    assert "syncline: all ranks start again in 0.01 s (--restarts allows it 2 times in 3600 s)" in error
    assert error.splitlines()[-1] == (
        "syncline: the job ended well when it was started for the third time; before: 1. rank 1 was killed by SIGKILL; "
        "2. rank 0 ended with exit code 3"
    )


def test_a_job_that_fails_each_time_is_given_up_with_its_exit_code():
    code, _, error = start("sys.exit(4)", restarts=AGAIN, num_ranks=1)
    assert code == 4
    assert error.count("the job failed: rank 0, exit code 4") == 3
    assert "syncline: no further restart, as --restarts allows it 2 times in 3600 s; attempts: 1. rank 0" in error


def test_the_summary_names_whom_the_report_of_the_attempt_names():
    """Rank 1 leaves, and rank 0 ends with an error that names it."""
    code, _, error = start(
        """
        if rank == 1: sys.exit()
        tell(ranks=[1], text="rank 1 left after 3 steps")
        sys.exit("DeadlineError: rank 1 left after 3 steps")
        """,
        restarts=RestartLimits(count=1, first_pause_s=0.01),
    )
    assert code == 1
    assert error.count("the job failed: rank 1, which ended with exit code 0") == 2
    assert error.splitlines()[-1].endswith(
        "attempts: 1. rank 1 ended with exit code 0; 2. rank 1 ended with exit code 0"
    )


def test_without_restarts_nothing_is_said_of_them():
    code, _, error = start("sys.exit(4)", num_ranks=1)
    assert code == 4
    assert "restart" not in error


def test_ctrl_c_in_the_pause_before_a_restart_ends_the_job(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(3)")
    command = (sys.executable, "-m", "syncline", "run", "--ranks", "1", "--restarts", "9", str(script))
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert any("start again in 1 s" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        assert "ended; attempts: 1. rank 0 ended with exit code 3" in process.stderr.read()
        assert process.wait(DEADLINE_S) == 130


@pytest.mark.parametrize("restarts", [RestartLimits(), AGAIN])
def test_survivors_of_an_elastic_job_go_on_and_a_restarted_rank_is_told_whom_to_join(restarts, tmp_path):
    """Rank 0 waits for the one that was started again, which knows where rank 0 listens and has no place of its own."""
    joined, listens = str(tmp_path / "joined"), str(tmp_path / "listens")
    os.mkfifo(joined)
    os.mkfifo(listens)
    code, out, error = start(
        f"""
        assert os.environ["SYNCLINE_ELASTIC"] == "on" and os.environ["SYNCLINE_MIN_RANKS"] == "1"
        if "SYNCLINE_JOIN" in os.environ:
            assert not {{"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}} & os.environ.keys()
            tell(met=True, number=2)  # it is in
            open({joined!r}, "w").write(os.environ["SYNCLINE_JOIN"])
        elif os.environ["RANK"] == "1":
            open({listens!r}).read()
            tell(met=True)
            os.kill(os.getpid(), 9)
        else:
            tell(doors=["a:1", "c:3"])
            open({listens!r}, "w").close()
            came = open({joined!r}).read() if {restarts.count} else "nobody"
            print(came)
        """,
        restarts=restarts,
        elastic=Elasticity(),
    )
    assert code == 0
    if restarts.count:
        assert out == "[0] a:1,own:1,c:3\n"
        assert "rank 1 was killed by SIGKILL; it starts again in 0.01 s, to join those that go on" in error
        assert "the job lost ranks, which came back: rank 1 (in the job: rank 2)" in error
    else:
        assert out == "[0] nobody\n"
        assert "the job went on without 1 of 2 ranks: rank 1, killed by SIGKILL" in error


def test_a_rank_that_dies_before_the_ranks_have_met_takes_its_place_again(tmp_path):
    """The others, here rank 0, wait for it there: nobody lets newcomers in yet."""
    os.mkfifo(tmp_path / "there")
    there = str(tmp_path / "there")
    code, out, error = start(
        f"""
        if os.environ["RANK"] == "0":
            print(open({there!r}).read())
        elif attempt == 0:
            os.kill(os.getpid(), 9)
        else:
            open({there!r}, "w").write(f"joins: {{'SYNCLINE_JOIN' in os.environ}}")
        """,
        restarts=AGAIN,
        elastic=Elasticity(),
    )
    assert (code, out) == (0, "[0] joins: False\n"), error


def test_a_rank_that_came_back_has_its_number_in_its_lines_and_the_report_leads_with_whom_errors_name(tmp_path):
    """Rank 1 is killed, comes in again as number 2, and leaves: rank 0 ends with an error that names it so."""
    os.mkfifo(tmp_path / "left")
    left = str(tmp_path / "left")
    code, out, error = start(
        f"""
        if "SYNCLINE_JOIN" in os.environ:
            tell(met=True, number=2)  # rank 0 ends when this one is in
            open({left!r}).read()
            print("is in", flush=True)
            sys.exit()
        if os.environ["RANK"] == "1":
            tell(met=True)
            os.kill(os.getpid(), 9)
        open({left!r}, "w").write("come in")
        tell(ranks=[2], text="rank 2 (host a1) left after 3 steps")
        sys.exit("DeadlineError: rank 2 (host a1) left after 3 steps")
        """,
        restarts=RestartLimits(count=1, first_pause_s=0.01),
        elastic=Elasticity(min_ranks=2),
    )
    assert code != 0
    assert set(out.splitlines()) == {"[1>2] is in"}
    assert "the job failed: rank 1 (in the job: rank 2), which ended with exit code 0" in error
    assert "rank 0 says: rank 2 (host a1) left after 3 steps" in error


def test_a_newcomer_that_still_waits_when_the_job_has_ended_well_is_ended_with_it(tmp_path):
    """Rank 0 ends when the other one waits, which would wait for ever, and be started again."""
    os.mkfifo(tmp_path / "waits")
    code, _, error = start(
        f"""
        waits = {str(tmp_path / "waits")!r}
        if "SYNCLINE_JOIN" in os.environ:
            open(waits, "w").write("waits")
            signal.pause()
        elif os.environ["RANK"] == "1":
            tell(met=True)
            os.kill(os.getpid(), 9)
        else:
            open(waits).read()
        """,
        restarts=RestartLimits(count=9, first_pause_s=0.01),
        elastic=Elasticity(),
    )
    assert code == 0
    assert "syncline: the job ended before rank 1 could join it" in error
    assert "the job went on without 1 of 2 ranks: rank 1, killed by SIGKILL" in error
    assert error.count("starts again") == 1


def test_an_elastic_job_with_too_few_survivors_has_failed():
    code, _, error = start("if os.environ['RANK'] == '1': sys.exit(3)", elastic=Elasticity(min_ranks=2))
    assert code == 3
    assert "the job failed: rank 1, exit code 3" in error


def test_a_job_that_loses_its_quorum_names_no_rank_that_it_had_survived(tmp_path):
    """Rank 1 is killed; ranks 0 and 2 go on, until rank 2 is killed too, which rank 0's error names."""
    os.mkfifo(tmp_path / "pid")
    os.mkfifo(tmp_path / "stop")
    code, _, error = start(
        f"""
        pid, stop = {str(tmp_path / "pid")!r}, {str(tmp_path / "stop")!r}

        def wait_until_launcher_has_seen_the_end_of(number):
            while os.path.exists(f"/proc/{{number}}"):
                os.sched_yield()

        tell(met=True)
        if rank == 1:
            open(pid, "w").write(str(os.getpid()))
            os.kill(os.getpid(), 9)
        if rank == 2:
            wait_until_launcher_has_seen_the_end_of(open(pid).read())
            open(stop, "w").write(str(os.getpid()))
            os.kill(os.getpid(), 9)
        wait_until_launcher_has_seen_the_end_of(open(stop).read())
        tell(ranks=[2], text="rank 2 lost; start again from a checkpoint")
        sys.exit("syncline.errors.QuorumLostError: rank 2 lost; start again from a checkpoint")
        """,
        elastic=Elasticity(min_ranks=2),
        num_ranks=3,
    )
    assert code == 128 + signal.SIGKILL
    assert "the job failed: rank 2, killed by SIGKILL" in error
    assert "the job failed: rank 1" not in error


def test_newcomers_are_told_whom_to_join_and_no_place():
    script = """
    import json
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SYNCLINE_SECRET_FILE"} & os.environ.keys()
    names = ("SYNCLINE_JOIN", "SYNCLINE_HOST", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    print(json.dumps([os.environ[name] for name in names]))
    """
    code, out, _ = start(script, elastic=Elasticity(join="127.0.0.1:4000, [::1]:4001"), host="c1")
    assert code == 0
    told = [json.loads(line.split(" ", 1)[1]) for line in sorted(out.splitlines())]
    assert told == [["127.0.0.1:4000,[::1]:4001", "c1", place, "2"] for place in "01"]


def test_ranks_of_a_machine_that_were_all_killed_join_on_others_and_else_meet_anew(tmp_path):
    """Here those of the machine where all have met first."""
    path = tmp_path / "net.yaml"
    path.write_text(TWO_HOSTS)
    script = """
    print(attempt, os.environ.get("SYNCLINE_JOIN", "meets"), flush=True)
    if attempt == 0:
        tell(met=True, doors=["own:0", "far:2", "farther:2"])
        os.kill(os.getpid(), 9)
    if attempt == 1: sys.exit(3)
    """
    code, out, error = start(
        script,
        topology=str(path),
        host="a1",
        master="127.0.0.1:4000",
        limits=Limits(),
        restarts=AGAIN,
        elastic=Elasticity(),
    )
    assert code == 0
    assert out.splitlines() == ["[a1:0] 0 meets", "[a1:0] 1 far:2,farther:2", "[a1:0] 2 meets"]
    assert "the ranks of this machine start again in 0.01 s, and join those that go on elsewhere" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--min-ranks", "2"), "--min-ranks 2 is said of an elastic job; add --elastic"),
        (("--join", "a1:x"), "--join must be HOST:PORT"),
        (("--join", "a1:4000", "--master", "a1"), "--join says where a member of the job listens"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, message, tmp_path):
    script = tmp_path / "script.py"
    script.touch()
    with pytest.raises(ConfigurationError, match=message):
        CliRunner().invoke(app, [*options, str(script)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--ranks", "0"), ("--restarts", "-1"), ("--restart-period", "0"), ("--min-ranks", "0"), ("--join-port", "70000")],
)
def test_numbers_keep_to_their_bounds(option, value):
    found = CliRunner().invoke(app, ["--elastic", option, value, "train.py"])
    assert found.exit_code == 2
    assert f"Invalid value for '{option}'" in found.output
