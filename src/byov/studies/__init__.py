"""One file a figure or table: a study says which runs it needs and what to make of them.

`measurements` has what only studies compute. A study is a module of `paper` or `beyond` with

    TITLE: str                                  one line, for `byov study --help`
    def runs(lab) -> list[Config]               what must be trained
    def results(lab) -> list[dict]              rows, from finished runs, by functions of `measurements` and below
    def draw(rows, scale) -> Figure             the picture
    CLAIMS: list[Claim]                         if it can judge any: the paper's claims with their rules

and nothing else has to know of it.
"""
