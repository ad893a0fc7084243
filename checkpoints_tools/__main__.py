"""`python -m checkpoints_tools`."""

from checkpoints_tools.main import main

main()
