/* hosts_turns.c - what ranks say before each collective, in two levels. See hosts.h, c10d_turn.c.
 *
 * The one idea: the ranks of a host read each other's turns in memory that they share, and one of them sends all of these to another
 * host as one message. For each pair of hosts that is the rank at one place, so places share the work. The message is received by a
 * thread of ours that always waits for the next one: it passes through none of torch's threads on its way, where a collective of all
 * ranks would pass through several on each, and be as slow as a megabyte.
 *
 * Turns are held twice, of even and of odd numbers. A rank says turn n+1 once it has read turn n of all, so when all of a host have said
 * n+1, what there was of turn n-1 has been read. A host sends n+1 then, so no host hears n+1 before its own ranks are done with n-1.
 */
#include "comm/hosts/hosts.h"

#include "base/file.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

/* From this rank to one other host and back. */
typedef struct wire {
    int host, rank;
    char *in;           /* [per_host] turns; owned by zs_hosts_turns */
    zs_work *receiving; /* of the thread; NULL: none */
    zs_work *sending[2];
} wire;

struct zs_hosts_turns {
    uint64_t number;   /* of the last turn */
    size_t host_bytes; /* of all turns of a host */
    zs_flat_mem board; /* of `local`: see own_turn and host_turns */
    char *memory;      /* of messages; owned */
    char *out[2];      /* even and odd; parts of it */
    pthread_t thread;  /* hears the other hosts */
    pthread_mutex_t lock;
    bool runs;        /* the thread has been started */
    bool ends;        /* under the lock: it is to end */
    bool hangs_up;    /* under the lock: and to end the connections */
    zs_work *awaited; /* under the lock: by the thread; NULL: nothing now; borrowed */
    int n_wires;
    wire wires[]; /* [n_wires] the hosts that this rank hears and tells */
};

/* --- where turns lie ------------------------------------------------------------------------------------------------------ */

/* The place whose ranks carry the turns between two hosts. */
static int carrier(const zs_hosts_comm *self, int host)
{
    return (self->host + host) % zs_hosts_per_host(self);
}

/* Hosts that one place carries, at most. */
static size_t hosts_a_lane(const zs_hosts_comm *self)
{
    size_t per_host = (size_t)zs_hosts_per_host(self);
    return ((size_t)self->hosts + per_host - 1) / per_host;
}

/* A rank's part of the board has its own turns, even and odd, then those of the hosts that it hears, even and odd. */
static char *part_of(const zs_hosts_comm *self, int lane)
{
    return self->turns->board.full + (size_t)lane * self->turns->board.shard_bytes;
}

static zs_c10d_turn *own_turn(const zs_hosts_comm *self, int lane, uint64_t number)
{
    return (zs_c10d_turn *)(void *)part_of(self, lane) + number % 2;
}

static char *host_turns(const zs_hosts_comm *self, int host, uint64_t number)
{
    size_t nth = (size_t)(host / zs_hosts_per_host(self));
    char *first = (char *)own_turn(self, carrier(self, host), 0) + 2 * sizeof(zs_c10d_turn);
    return first + (2 * nth + number % 2) * self->turns->host_bytes;
}

/* --- hearing -------------------------------------------------------------------------------------------------------------- */

/* The message that the thread waits for next; false: it is to end. */
static bool set_awaited(zs_hosts_turns *turns, zs_work *work)
{
    pthread_mutex_lock(&turns->lock);
    bool goes_on = !turns->ends;
    turns->awaited = goes_on ? work : NULL;
    pthread_mutex_unlock(&turns->lock);
    return goes_on;
}

static bool await(zs_hosts_turns *turns, zs_work *work)
{
    if (!set_awaited(turns, work)) return false;
    bool came = zs_work_await(work);
    return set_awaited(turns, NULL) && came;
}

static zs_status receive(zs_hosts_comm *self, wire *from)
{
    return zs_group_receive(self->c10d.group, from->in, self->turns->host_bytes, from->rank, &from->receiving);
}

/* Hears turn `number` of all hosts that this rank hears. */
static bool hear(zs_hosts_comm *self, uint64_t number)
{
    zs_hosts_turns *turns = self->turns;
    for (int i = 0; i < turns->n_wires; i++) {
        wire *from = &turns->wires[i];
        if (!await(turns, from->receiving)) return false;
        memcpy(host_turns(self, from->host, number), from->in, turns->host_bytes);
        zs_work_free(from->receiving);
        from->receiving = NULL;
        if (receive(self, from) != ZS_OK) return false;
    }
    zs_hosts_mark(self, ZS_HOSTS_HEARD, number);
    return true;
}

static void hang_up(const zs_hosts_turns *turns)
{
    for (int i = 0; i < turns->n_wires; i++)
        if (turns->wires[i].receiving != NULL) zs_work_hang_up(turns->wires[i].receiving);
}

static void *listen_to_hosts(void *arg)
{
    zs_hosts_comm *self = arg;
    zs_hosts_turns *turns = self->turns;
    uint64_t number = 1;
    zs_clear_error();
    while (hear(self, number))
        number++;
    pthread_mutex_lock(&turns->lock);
    bool asked = turns->ends, hangs_up = turns->hangs_up;
    pthread_mutex_unlock(&turns->lock);
    if (!asked) zs_hosts_mark_deaf(self, zs_last_message());
    if (hangs_up) hang_up(turns);
    return NULL;
}

static void end_thread(zs_hosts_turns *turns, bool hangs_up)
{
    if (!turns->runs) return;
    pthread_mutex_lock(&turns->lock);
    turns->ends = true;
    turns->hangs_up = hangs_up;
    if (turns->awaited != NULL) zs_work_abort(turns->awaited);
    pthread_mutex_unlock(&turns->lock);
    pthread_join(turns->thread, NULL);
    turns->runs = false;
}

/* --- saying --------------------------------------------------------------------------------------------------------------- */

/* Sends the host's turns to the hosts that this rank tells. What was sent two turns ago has been heard. */
static zs_status tell_hosts(zs_hosts_comm *self)
{
    zs_hosts_turns *turns = self->turns;
    uint64_t number = turns->number;
    char *out = turns->out[number % 2];
    for (int lane = 0; lane < zs_hosts_per_host(self); lane++)
        memcpy(out + (size_t)lane * sizeof(zs_c10d_turn), own_turn(self, lane, number), sizeof(zs_c10d_turn));
    for (int i = 0; i < turns->n_wires; i++) {
        zs_work **work = &turns->wires[i].sending[number % 2];
        zs_work_free(*work);
        *work = NULL;
        ZS_TRY(zs_group_send(self->c10d.group, out, turns->host_bytes, turns->wires[i].rank, work));
    }
    return ZS_OK;
}

typedef struct exchanging {
    zs_hosts_awaited it;
    zs_status status; /* of sending */
} exchanging;

/* First all ranks of the host have said their turn, then they have heard those of the other hosts. */
static bool look(void *arg, double seconds)
{
    exchanging *now = arg;
    if (now->it.event == ZS_HOSTS_SAID) {
        if (!zs_hosts_look(&now->it, seconds)) return false;
        if (now->it.why != NULL) return true;
        now->status = tell_hosts(now->it.self);
        if (now->status != ZS_OK) return true;
        now->it.event = ZS_HOSTS_HEARD;
    }
    return zs_hosts_look(&now->it, seconds);
}

static zs_status exchange(zs_hosts_comm *self, const zs_c10d_turn *mine)
{
    exchanging now = {{self, ZS_HOSTS_SAID, self->turns->number, NULL}, ZS_OK};
    zs_c10d_arrival until = {look, &now, "other ranks have not come here"};
    ZS_TRY(zs_c10d_watch_turn(&self->c10d, mine, &until));
    if (now.status != ZS_OK) return zs_c10d_fail(&self->c10d, mine, now.status);
    if (now.it.why == NULL) return ZS_OK;
    return zs_c10d_fail(&self->c10d, mine, ZS_FAIL(ZS_ERR_PEER, "%s", now.it.why));
}

/* A zs_c10d_say. */
static zs_status say(zs_c10d_comm *comm, const zs_c10d_turn *mine, zs_c10d_turn *turns)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    uint64_t number = ++self->turns->number;
    *own_turn(self, self->lane, number) = *mine;
    zs_hosts_mark(self, ZS_HOSTS_SAID, number);
    zs_status status = exchange(self, mine);
    if (status != ZS_OK) {
        end_thread(self->turns, status != ZS_ERR_TORCH); /* Ctrl-C: the peers may get one, too */
        return zs_hosts_pass(self, status);
    }
    for (int host = 0; host < self->hosts; host++) {
        zs_c10d_turn *theirs = turns + zs_hosts_rank(self, host, 0);
        if (host != self->host) {
            memcpy(theirs, host_turns(self, host, number), self->turns->host_bytes);
            continue;
        }
        for (int lane = 0; lane < zs_hosts_per_host(self); lane++)
            theirs[lane] = *own_turn(self, lane, number);
    }
    return ZS_OK;
}

/* --- birth and end -------------------------------------------------------------------------------------------------------- */

static void find_wires(zs_hosts_comm *self)
{
    zs_hosts_turns *turns = self->turns;
    char *at = turns->memory + 2 * turns->host_bytes;
    for (int host = 0; host < self->hosts; host++) {
        if (host == self->host || carrier(self, host) != self->lane) continue;
        turns->wires[turns->n_wires++] = (wire){host, zs_hosts_rank(self, host, self->lane), .in = at};
        at += turns->host_bytes;
    }
}

static zs_status start_thread(zs_hosts_comm *self)
{
    zs_hosts_turns *turns = self->turns;
    for (int i = 0; i < turns->n_wires; i++)
        ZS_TRY(receive(self, &turns->wires[i]));
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the script's threads */
    int error = pthread_create(&turns->thread, NULL, listen_to_hosts, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0) return ZS_FAIL(ZS_ERR_MEMORY, "cannot start a thread that hears other hosts: %s", strerror(error));
    turns->runs = true;
    return ZS_OK;
}

zs_status zs_hosts_turns_new(zs_hosts_comm *self)
{
    if (!zs_group_has_messages(self->c10d.group)) return ZS_OK;
    size_t lanes = hosts_a_lane(self), bytes = (size_t)zs_hosts_per_host(self) * sizeof(zs_c10d_turn);
    zs_hosts_turns *turns = calloc(1, sizeof *turns + lanes * sizeof(wire));
    char *memory = calloc(lanes + 2, bytes);
    if (turns == NULL || memory == NULL) {
        free(turns);
        free(memory);
        return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the hosts transport");
    }
    self->turns = turns;
    turns->memory = memory;
    turns->out[0] = memory;
    turns->out[1] = memory + bytes;
    turns->host_bytes = bytes;
    pthread_mutex_init(&turns->lock, NULL);
    find_wires(self);
    size_t part = 2 * sizeof(zs_c10d_turn) + 2 * lanes * bytes;
    ZS_TRY(zs_comm_flat_new(self->local, zs_file_bucket_room(part), &turns->board));
    if (turns->n_wires > 0)
        ZS_TRY(start_thread(self));
    else
        zs_hosts_mark(self, ZS_HOSTS_HEARD, UINT64_MAX);
    self->c10d.say = say;
    return ZS_OK;
}

void zs_hosts_turns_stop(zs_hosts_comm *self)
{
    if (self->turns != NULL && !zs_c10d_is_forked(&self->c10d)) end_thread(self->turns, false);
}

void zs_hosts_turns_free(zs_hosts_comm *self)
{
    zs_hosts_turns *turns = self->turns;
    if (turns == NULL || zs_c10d_is_forked(&self->c10d)) return;
    end_thread(turns, false);
    for (int i = 0; i < turns->n_wires; i++) {
        zs_work_free(turns->wires[i].receiving);
        zs_work_free(turns->wires[i].sending[0]);
        zs_work_free(turns->wires[i].sending[1]);
    }
    zs_mem_release(turns->board.mem);
    pthread_mutex_destroy(&turns->lock);
    free(turns->memory);
    free(turns);
    self->turns = NULL;
}
