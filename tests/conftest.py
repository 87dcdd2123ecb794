"""What every test starts with: one thread for arithmetic (two cores are shared by all ranks) and a printed seed."""

import os
import shutil
import signal
import tempfile
from collections import Counter

os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

LONGEST = (
    "labs",
    *(
        f"tests/{name}.py"
        for name in (
            "conformance/test_programs",
            "cli/test_demo",
            "packaging/test_wheel",
            "launchers/test_under_ray",
            "updates/clustered/test_protocol_orders",
            "frameworks/test_framework_examples",
            "mutants/test_mutants",
            "docs/test_document_blocks",
            "pytorch/test_checkpoint_crashes",
            "examples/test_examples",
            "simulation/test_simulation",
            "launchers/test_under_mpi",
            "pytorch/test_fleet_processes",
            "cli/test_launch_function",
            "fabric/test_fuzz",
            "updates/clustered/test_clustered_processes",
            "updates/overlapped/test_overlapped_every_order",
            "elastic/test_elastic_sharded_training",
            "pytorch/test_phased_resume",
            "launchers/test_joined_jobs",
            "docs/test_message_path",
            "elastic/test_elastic_processes",
            "elastic/test_elastic_sharded_processes",
            "docs/test_document_tests",
        )
    ),
)
"""What takes a worker longest, the longest first; most of it has few tests, and would come last otherwise."""

hypothesis.settings.register_profile(
    "house",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # it asks the clock, and a busy machine is slow
)
hypothesis.settings.load_profile("house")


def pytest_configure(config):
    """Let what processes of tests leave in the temporary folder (torchrun its logs, the killed theirs) go at the end.

    Tests themselves have ``tmp_path``, which stays for a look at what failed.
    """
    if not hasattr(config, "workerinput"):
        tempfile.gettempdir()  # remembered for this process
        folder = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="sl-")  # short: paths of Unix sockets lie in it
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def scope_of(nodeid):
    """Return what one worker runs: the tests of a file, which share fixtures, or all that build labs.

    Those see each other. Groups by ``xdist_group`` are what xdist has for this; since pytest 9.2 their marks have no
    effect.
    """
    path = nodeid.partition("::")[0]
    return "labs" if path.split("/")[-2] in {"lab", "bench", "soak"} else path


class FileScheduling(LoadScopeScheduling):
    """Gives the scopes to the workers in the order in which they are collected."""

    def _split_scope(self, nodeid):
        return scope_of(nodeid)


def pytest_xdist_make_scheduler(config, log):
    """Divide tests among workers, whatever --dist says."""
    config.option.loadscopereorder = False
    return FileScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Begin with what takes longest, so that no worker is left alone with it at the end; then what has most tests."""
    if hasattr(config, "workerinput"):
        sizes = Counter(scope_of(item.nodeid) for item in items)
        places = {scope: place for place, scope in enumerate(LONGEST)}
        items.sort(key=lambda item: (places.get(scope_of(item.nodeid), len(LONGEST)), -sizes[scope_of(item.nodeid)]))


@pytest.fixture
def in_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect ranks, where they are not all connected, to the one before and the one after them alone."""
    from syncline.fabric import gossip

    monkeypatch.setattr(gossip, "distances", lambda world_size: [1, world_size - 1])
