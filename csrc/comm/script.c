/* script.c - see script.h. */
#include "comm/script.h"

#include <stdio.h>
#include <string.h>

static _Thread_local char call[ZS_CALL];

bool zs_call_begin(const char *name)
{
    if (call[0] != 0) return false;
    snprintf(call, sizeof call, "%s", name);
    return true;
}

void zs_call_end(void)
{
    call[0] = 0;
}

const char *zs_call_name(void)
{
    return call;
}

bool zs_calls_match(const char *a, const char *b)
{
    return a[0] == 0 || b[0] == 0 || strcmp(a, b) == 0;
}

void zs_script_place(char *text, size_t size)
{
    snprintf(text, size, "%s%s", call[0] != 0 ? "in " : "", call);
}
