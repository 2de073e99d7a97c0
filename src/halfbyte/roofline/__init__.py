"""Where decode time goes: ceilings measured here, every kernel of a step in its class, and a report of both.

ceilings.py measures what the machine can do; events.py, names.py, roles.py and align.py say what each kernel was for;
work.py what it had to move; attribution.py adds it up; run.py takes a model through providers, batches and modes;
analysis.py holds times against ceilings; record.py, render.py, plot.py, page.py and compare.py write it down;
counters.py asks the hardware, where `ncu` may.
"""
