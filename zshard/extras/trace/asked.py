"""Importing this traces the rest of the process, if ZSHARD_TRACE=file asks for it."""

import os

from zshard.extras.trace import trace_to

if os.environ.get("ZSHARD_TRACE"):
    trace_to(os.environ["ZSHARD_TRACE"])
