"""4-bit weights behind a server: a plugin for vLLM, and `halfbyte serve`."""
