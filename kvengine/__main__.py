"""`python -m kvengine`: the command, where no script of that name is on the path."""

from kvengine.cli import main

if __name__ == "__main__":
    main()
