"""Benchmarks: correctness first, then time, beside the peers, in one run.

case.py says what is compared and how many bytes it must move; timing.py measures; runs.py goes through cases or models;
records.py keeps what was measured and where; report.py turns records into tables and plots. A bench is a module that
makes cases, such as dequantize.py, or has whole models compete (contest.py), such as decode.py.
"""
