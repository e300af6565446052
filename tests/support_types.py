"""What checks signatures at run time (`make test-shapes`): an int is a float, as everywhere in Python's types."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
