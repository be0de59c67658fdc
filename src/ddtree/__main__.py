"""`python -m ddtree` is the `ddtree` command."""

from ddtree.cli.main import main

main()
