/* status.c - the thread-local failure record behind status.h. First failure wins. */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct error_record {
    zs_status status;
    int native_errno;
    char message[2048];
    char lines[ZS_LINES];
} error_record;

static _Thread_local error_record record;

zs_status zs_fail(zs_status status, const char *fmt, ...)
{
    if (record.status != ZS_OK) return status;
    record.status = status;
    record.native_errno = 0;
    record.lines[0] = 0;
    va_list args;
    va_start(args, fmt);
    vsnprintf(record.message, sizeof record.message, fmt, args);
    va_end(args);
    return status;
}

zs_status zs_fail_errno(int err, const char *what)
{
    if (record.status != ZS_OK) return ZS_ERR_SYSTEM;
    record.status = ZS_ERR_SYSTEM;
    record.native_errno = err;
    record.lines[0] = 0;
    snprintf(record.message, sizeof record.message, "%s: %s", what, strerror(err));
    return ZS_ERR_SYSTEM;
}

zs_status zs_rephrase(const char *fmt, ...)
{
    char message[sizeof record.message];
    if (record.status == ZS_OK) return ZS_OK;
    va_list args;
    va_start(args, fmt);
    vsnprintf(message, sizeof message, fmt, args);
    va_end(args);
    memcpy(record.message, message, sizeof message);
    return record.status;
}

void zs_add_lines(const char *lines)
{
    size_t used = strlen(record.lines);
    if (record.status != ZS_OK) snprintf(record.lines + used, sizeof record.lines - used, "%s", lines);
}

const char *zs_last_lines(void)
{
    return record.status == ZS_OK ? "" : record.lines;
}

const char *zs_last_message(void)
{
    return record.status == ZS_OK ? "" : record.message;
}

zs_status zs_last_status(void)
{
    return record.status;
}

int zs_last_errno(void)
{
    return record.native_errno;
}

void zs_clear_error(void)
{
    record.status = ZS_OK;
    record.native_errno = 0;
}
