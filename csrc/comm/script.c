/* script.c - see script.h. */
#include "comm/script.h"

#include "comm/comm.h"
#include "comm/comm_local.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char call[ZS_CALL];
static _Atomic(const char *) main_call;
static void (*_Atomic look_hook)(char *text, size_t size);

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

void zs_call_swap(char name[ZS_CALL])
{
    char before[ZS_CALL];
    memcpy(before, call, ZS_CALL);
    memcpy(call, name, ZS_CALL);
    memcpy(name, before, ZS_CALL);
}

/* The address of `call` stands for this thread. */
zs_status zs_comm_hold(zs_comm *comm)
{
    const void *none = NULL;
    if (atomic_load(&comm->user) != call && !atomic_compare_exchange_strong(&comm->user, &none, call))
        return ZS_FAIL(
            ZS_ERR_STATE,
            "two threads of rank %d communicate with the same ranks over transport '%s' at the same time, and "
            "other ranks may do so in another order; use models from one thread, or pass each model a process_group= "
            "of its own",
            comm->rank, comm->ops->name);
    comm->entered++;
    return ZS_OK;
}

void zs_comm_unhold(zs_comm *comm)
{
    if (--comm->entered == 0) atomic_store(&comm->user, NULL);
}

zs_status zs_comm_enter(zs_comm *comm)
{
    return comm->ops->mapped ? ZS_OK : zs_comm_hold(comm);
}

void zs_comm_leave(zs_comm *comm)
{
    if (!comm->ops->mapped) zs_comm_unhold(comm);
}

void zs_script_place(char *text, size_t size)
{
    snprintf(text, size, "%s%s", call[0] != 0 ? "in " : "", call);
}

void zs_call_watch(void)
{
    atomic_store(&main_call, call);
}

const char *zs_call_of_main(void)
{
    return atomic_load(&main_call);
}

void zs_script_on_look(void (*look)(char *text, size_t size))
{
    atomic_store(&look_hook, look);
}

void zs_script_look(char *text, size_t size)
{
    void (*look)(char *, size_t) = atomic_load(&look_hook);
    text[0] = 0;
    if (look != NULL) look(text, size);
}
