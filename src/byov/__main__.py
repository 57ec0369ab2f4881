"""`python -m byov`, for `torchrun -m byov train ...`."""

from byov.cli import main

main()
