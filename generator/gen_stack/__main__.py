"""`python -m gen_stack`."""

from gen_stack.cli import main

main()
