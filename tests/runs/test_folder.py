from byov.runs.folder import RunFolder, read_log


def test_log_skips_and_counts_lines_that_cannot_be_read(tmp_path):
    path = RunFolder(tmp_path).metrics
    assert read_log(path) == ([], 0)
    path.write_text('{"step": 1}\n\n{"step": 2}\n[3]\n{"step": 4, "lo')
    assert read_log(path) == ([{"step": 1}, {"step": 2}], 2)
