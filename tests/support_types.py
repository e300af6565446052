"""What checks signatures at run time (`make test-shapes`): an int is a float, as everywhere in Python's types."""

import typer
from beartype import BeartypeConf, FrozenDict, beartype

# typer wants its own class in a command's signature, and passes the class below it.
PASSED = FrozenDict({typer.Context: typer.Context.__mro__[1]})

checked = beartype(conf=BeartypeConf(is_pep484_tower=True, hint_overrides=PASSED))
