"""4-bit formats, and the layouts in which other libraries keep them. Importing any of it makes these known."""

from halfbyte.formats.fp4 import FP4
from halfbyte.formats.int4 import INT4
from halfbyte.formats.mxfp4 import MXFP4
from halfbyte.formats.nf4 import NF4
from halfbyte.formats.spec import register

for _format in (NF4, FP4, INT4, MXFP4):
    register(_format)
