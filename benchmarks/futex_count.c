/* futex_count.c - preloaded by many_ranks.py: how often this process sleeps and wakes by way of syscall(2).
 *
 * zshard's core asks for futexes by syscall(), while libc's and torch's locks do not, so that is zshard's share.
 */
#define _GNU_SOURCE 1 /* RTLD_NEXT */
#include <dlfcn.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/syscall.h>

static _Atomic long waits, wakes;

/* How many calls so far. */
long futex_waits(void);
long futex_wakes(void);

long futex_waits(void)
{
    return waits;
}

long futex_wakes(void)
{
    return wakes;
}

long syscall(long number, ...)
{
    static long (*real)(long, ...);
    long arg[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++)
        arg[i] = va_arg(list, long);
    va_end(list);
    if (real == 0) *(void **)&real = dlsym(RTLD_NEXT, "syscall");
    if (number == SYS_futex) *(arg[1] == FUTEX_WAKE ? &wakes : &waits) += 1;
    return real(number, arg[0], arg[1], arg[2], arg[3], arg[4], arg[5]);
}
