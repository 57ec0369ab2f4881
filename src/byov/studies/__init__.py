"""One file per figure or table of the paper (`paper`), and per question beyond it (`beyond`).

A study is a module of either package with

    TITLE: str                                  one line, for `byov study --help`
    def runs(lab) -> list[Config]               the runs it needs
    def results(lab) -> Rows                    rows, measured from the finished runs
    def draw(rows, scale) -> Figure             the figure
    CLAIMS: list[Claim]                         the claims it can judge with their rules, if any

and needs no registration. To follow a study from the command to its figure, read `framework/lab.py` (trains, caches and
writes), the study's file (names the runs and measures them) and, where it compares arms, `framework/compare.py`.
`measurements` holds what several studies measure.
"""
