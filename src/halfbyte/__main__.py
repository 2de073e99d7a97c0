"""`python -m halfbyte` is `halfbyte`."""

from halfbyte.cli import app

app()
