"""What the benches and the profile share, and neither owns.

timing.py and ab_run.py measure; records.py says what was measured, where and by which code; report.py is what every
table and plot of a record begins with; models.py loads a model, decoder.py decodes with it; error.py compares results.
"""
