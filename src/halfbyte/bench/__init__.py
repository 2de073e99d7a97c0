"""Benchmarks: correctness first, then time, beside the peers, in one run.

case.py says what is compared and how many bytes it must move, checks it and has it timed; runs.py goes through cases
or models; report.py turns records into tables and plots. A bench is a module that makes cases, such as dequantize.py,
or has whole models compete, such as decode.py. What measures and keeps records stands in halfbyte.measure.
"""
