"""What every test starts with: one thread for arithmetic (two cores are shared by all ranks) and a printed seed."""

import os
import shutil
import signal
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from syncline.fabric.transport_sets import VARIABLE
from transports import TRANSPORTS

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


def pytest_report_header():
    """Say which transports are tested: without a compiler it is one."""
    return f"transports of TCP fabrics: {', '.join(TRANSPORTS)}"


class FileScheduling(LoadScopeScheduling):
    """One worker runs all tests of a file, which share fixtures, and one all that build labs, which see each other.

    Groups by ``xdist_group`` are what xdist has for this; since pytest 9.2 their marks have no effect.
    """

    def _split_scope(self, nodeid):
        path = nodeid.partition("::")[0]
        return "labs" if path.split("/")[-2] in {"lab", "bench", "soak"} else path


def pytest_xdist_make_scheduler(config, log):
    """Divide tests among workers, whatever --dist says."""
    return FileScheduling(config, log)


@pytest.fixture(params=list(TRANSPORTS))
def transport(request, monkeypatch):
    """Open TCP fabrics, here and in processes that are started, with transports of each kind that is installed."""
    monkeypatch.setenv(VARIABLE, TRANSPORTS[request.param])
    return request.param
