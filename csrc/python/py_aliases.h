/* py_aliases.h - tensors of the script's on memory that a parameter has left (unit/moved.h) keep their values. */
#ifndef ZS_PY_ALIASES_H
#define ZS_PY_ALIASES_H

#include "python/py_engine.h"

/* To be called, with the GIL, where a pass may begin, before the engine's own call, which writes to that memory:
 * moves other tensors off it (guard/aliases.py). No-op within a pass. -1 with an exception. */
int zs_py_keep_aliases(const zs_engine *engine);

#endif
