"""``python -m syncline``: the command line, where its folder is not on the path."""

from syncline.cli.main import main

main()
