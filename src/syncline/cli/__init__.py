"""The command line: thin commands that compose the other rooms, each imported when it is called."""
