"""What the driver of the agreement does with its communicator, on one that only counts."""

from syncline.members import Epoch
from syncline.members.agreement import Loss, Report
from syncline.runtime.control import Failure
from syncline.runtime.failures import DEADLINE
from syncline.runtime.regroup import Regroup, encode_report

EPOCH = Epoch(number=0, members=tuple(range(20)))


class CountingCommunicator:
    """Communicator of rank 0 and port in one, whose loop's thread is the caller's."""

    rank = 0
    members = tuple(range(20))
    num_interrupted = 0
    loss = None

    def open_port(self, _name):
        return self

    def call(self, function, _timeout_s):
        function()

    def call_soon(self, function, *args):
        function(*args)

    def watch_controls(self, _stream, on_control):
        self.on_control = on_control

    def watch_losses(self, on_lost):
        self.on_lost = on_lost

    def describe_peer(self, rank):
        return f"rank {rank}"

    def drop_streams(self, streams):
        assert streams == []

    def watch_failure(self, handler):
        self.on_failure = handler

    def interrupt(self, _why, *, lost):
        assert lost == 19
        self.num_interrupted += 1


def test_reports_of_all_others_end_the_calls_of_each_epoch_once():
    communicator, newer = CountingCommunicator(), CountingCommunicator()
    regroup = Regroup(communicator, EPOCH, stream=1, min_ranks=1, timeout_s=1.0)
    report = encode_report(Report(base=EPOCH, losses={19: Loss(accuser=1)}, first_free=1))
    for peer in range(1, 10):
        communicator.on_control(peer, report)
    assert communicator.num_interrupted == 1
    regroup.enter(newer, over=())  # which a report that came before has ended, too
    for peer in range(10, 19):
        communicator.on_control(peer, report)
    assert (communicator.num_interrupted, newer.num_interrupted) == (1, 1)


def test_whom_calls_fail_for_is_lost_before_what_that_rank_reports():
    """Rank 1 hangs; rank 2, of whom it has heard first that it does, must not be believed to be lost."""
    communicator = CountingCommunicator()
    regroup = Regroup(communicator, EPOCH, stream=1, min_ranks=1, timeout_s=1.0)
    communicator.loss = Failure(reason=DEADLINE, text="rank 1 sent nothing", rank=1)
    communicator.on_failure(None)
    communicator.on_control(1, encode_report(Report(base=EPOCH, losses={2: Loss(accuser=1)}, first_free=1)))
    assert set(regroup._machine.losses) == {1}
