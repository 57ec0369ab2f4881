"""`python -m byov`, for `torchrun -m byov train ...`."""

from byov.cli.main import main

main()
