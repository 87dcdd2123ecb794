"""Ranks in threads that make calls over shared memory."""

from concurrent.futures import ThreadPoolExecutor


def on_all(communicators, body):
    """Run ``body`` on each rank in a thread of its own; return what it returned, or the error that it ended with."""

    def run(communicator):
        try:
            return body(communicator)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(communicators)) as pool:
        return list(pool.map(run, communicators))
