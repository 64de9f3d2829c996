"""``python -m tensorferry``: the command line."""

from tensorferry.cli.main import main

main()
