"""``syncline dump``: let all ranks of a running job write their last calls now."""

from __future__ import annotations

from syncline.cli.asking import Endpoint, SecretFile, ask
from syncline.cli.commands import new_app

app = new_app()


@app.command()
def dump(endpoint: Endpoint, *, secret_file: SecretFile = None) -> None:
    """Let all ranks of a running job write their last calls, each to its folder for them (--log-dir).

    It was started with --metrics PORT too, and this asks rank 0's port.
    """
    told = ask(endpoint, "/dump", secret_file)
    print(
        f"{told['ranks']} ranks write to {told['folder']}, each on its machine; torchfrtrace {told['folder']} reads it"
    )
