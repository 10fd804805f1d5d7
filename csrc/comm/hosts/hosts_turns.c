/* hosts_turns.c - ranks' turns before each collective, in two levels. See hosts.h, comm/turn.h.
 *
 * The ranks of a host read each other's turns in shared memory, and one of them sends all of these to another host as
 * one message. For each pair of hosts that is the rank at one place, so places share the work. A thread of ours
 * receives the message, and always waits for the next one: it passes through none of torch's threads, while a
 * collective of all ranks would pass through several on each, and be as slow as a megabyte.
 *
 * Turns advance while the script computes. Each queued turn has a ticket; tickets are served in order. If all ranks
 * have the same turn, the thread begins the collective, too. Otherwise it stops on all ranks, and the script's thread
 * handles it.
 *
 * There are two buffers for turns, for even and odd numbers. A rank sends turn n+1 once it has read turn n of all,
 * so when all of a host have sent n+1, turn n-1 has been read. Only then does a host send n+1, so no host receives
 * n+1 before its own ranks are done with n-1. */
#define _GNU_SOURCE 1 /* pthread_sigmask */
#include "comm/hosts/hosts.h"

#include "base/clock.h"
#include "base/file.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* From this rank to one other host and back. */
typedef struct wire {
    int host, rank;
    char *in;           /* [per_host] turns; owned by zs_hosts_turns */
    zs_work *receiving; /* NULL: none */
    zs_work *sending[2];
} wire;

struct zs_hosts_turns {
    zs_turns_ops ops;  /* those of c10d, but `exchange` */
    uint64_t number;   /* of the last turn sent; used by the thread only */
    size_t host_bytes; /* of all turns of a host */
    zs_flat_mem board; /* of `local`: see own_turn and host_turns */
    char *memory;      /* of messages; owned */
    char *out[2];      /* even and odd; within it */
    pthread_t thread;
    pthread_mutex_t lock;   /* of all that follows */
    pthread_cond_t changed; /* on the monotonic clock */
    bool runs;              /* the thread was started */
    bool ends;              /* it must end */
    bool stopped;           /* it sends only urgent tickets */
    bool closed;            /* the thread has stopped receiving; `why` is set first */
    char why[ZS_C10D_TEXT];
    zs_work *awaited;              /* NULL: none now; borrowed */
    zs_hosts_ticket *first, *last; /* to be sent; borrowed */
    int n_wires;
    wire wires[]; /* [n_wires] the hosts that this rank sends to and receives from */
};

/* --- where turns lie ---------------------------------------------------------------------------------------------- */

/* The place whose ranks carry the turns between two hosts. */
static int carrier(const zs_hosts_comm *self, int host)
{
    return (self->host + host) % zs_hosts_per_host(self);
}

/* The number of hosts that one place serves, at most. */
static size_t hosts_a_lane(const zs_hosts_comm *self)
{
    size_t per_host = (size_t)zs_hosts_per_host(self);
    return ((size_t)self->hosts + per_host - 1) / per_host;
}

/* A rank's part of the board has its own turns, even and odd, then those of the hosts that it receives, even and
 * odd. */
static char *part_of(const zs_hosts_comm *self, int lane)
{
    return self->turns->board.full + (size_t)lane * self->turns->board.shard_bytes;
}

static zs_turn *own_turn(const zs_hosts_comm *self, int lane, uint64_t number)
{
    return (zs_turn *)(void *)part_of(self, lane) + number % 2;
}

static char *host_turns(const zs_hosts_comm *self, int host, uint64_t number)
{
    size_t nth = (size_t)(host / zs_hosts_per_host(self));
    char *first = (char *)own_turn(self, carrier(self, host), 0) + 2 * sizeof(zs_turn);
    return first + (2 * nth + number % 2) * self->turns->host_bytes;
}

/* --- one turn, on the thread -------------------------------------------------------------------------------------- */

/* Sets the message to wait for; false: the thread must end. */
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

/* Waits until all ranks of the host have sent or received the turn; false: they will not, or the thread must end. */
static bool await_host(zs_hosts_comm *self, zs_hosts_event event)
{
    static const double slice = 0.1; /* seconds */
    zs_hosts_awaited it = {self, event, self->turns->number, NULL};
    while (set_awaited(self->turns, NULL)) {
        if (!zs_hosts_poll(&it, slice)) continue;
        if (it.why == NULL) return true;
        (void)ZS_FAIL(ZS_ERR_PEER, "%s", it.why);
        return false;
    }
    return false;
}

/* Sends the host's turns to this rank's hosts. What was sent two turns ago has been received. */
static zs_status send_to_hosts(zs_hosts_comm *self)
{
    zs_hosts_turns *turns = self->turns;
    uint64_t number = turns->number;
    char *out = turns->out[number % 2];
    for (int lane = 0; lane < zs_hosts_per_host(self); lane++)
        memcpy(out + (size_t)lane * sizeof(zs_turn), own_turn(self, lane, number), sizeof(zs_turn));
    for (int i = 0; i < turns->n_wires; i++) {
        zs_work **work = &turns->wires[i].sending[number % 2];
        zs_work_free(*work);
        *work = NULL;
        ZS_TRY(zs_group_send(self->c10d.group, out, turns->host_bytes, turns->wires[i].rank, work));
    }
    return ZS_OK;
}

/* Receives the turn of all this rank's hosts. */
static bool receive_all(zs_hosts_comm *self)
{
    zs_hosts_turns *turns = self->turns;
    for (int i = 0; i < turns->n_wires; i++) {
        wire *from = &turns->wires[i];
        if (!await(turns, from->receiving)) return false;
        memcpy(host_turns(self, from->host, turns->number), from->in, turns->host_bytes);
        zs_work_free(from->receiving);
        from->receiving = NULL;
        if (receive(self, from) != ZS_OK) return false;
    }
    zs_hosts_mark(self, ZS_HOSTS_RECEIVED, turns->number);
    return true;
}

static void read_turns(const zs_hosts_comm *self, zs_turn *out)
{
    uint64_t number = self->turns->number;
    for (int host = 0; host < self->hosts; host++) {
        zs_turn *theirs = out + zs_hosts_rank(self, host, 0);
        if (host != self->host) {
            memcpy(theirs, host_turns(self, host, number), self->turns->host_bytes);
            continue;
        }
        for (int lane = 0; lane < zs_hosts_per_host(self); lane++)
            theirs[lane] = *own_turn(self, lane, number);
    }
}

/* False: no more will come. */
static bool take_turn(zs_hosts_comm *self, zs_hosts_ticket *ticket)
{
    uint64_t number = ++self->turns->number;
    *own_turn(self, self->lane, number) = ticket->mine;
    zs_hosts_mark(self, ZS_HOSTS_SENT, number);
    bool good = await_host(self, ZS_HOSTS_SENT) && send_to_hosts(self) == ZS_OK && receive_all(self) &&
                await_host(self, ZS_HOSTS_RECEIVED);
    if (good) read_turns(self, ticket->turns);
    return good;
}

/* --- one after the other ------------------------------------------------------------------------------------------ */

/* The next ticket to send; NULL: the thread must end. */
static zs_hosts_ticket *next_ticket(zs_hosts_turns *turns)
{
    pthread_mutex_lock(&turns->lock);
    while (!turns->ends && (turns->first == NULL || (turns->stopped && !turns->first->urgent)))
        pthread_cond_wait(&turns->changed, &turns->lock);
    zs_hosts_ticket *ticket = turns->ends ? NULL : turns->first;
    pthread_mutex_unlock(&turns->lock);
    return ticket;
}

/* Returns the ticket, which is the first, to the script's thread. */
static void hand_back(zs_hosts_turns *turns, zs_hosts_ticket *ticket, bool begun)
{
    pthread_mutex_lock(&turns->lock);
    turns->first = ticket->next;
    if (turns->first == NULL) turns->last = NULL;
    if (!begun) turns->stopped = true;
    ticket->state = begun ? ZS_HOSTS_BEGUN : ZS_HOSTS_STOPPED;
    pthread_cond_broadcast(&turns->changed);
    pthread_mutex_unlock(&turns->lock);
}

static void *run(void *arg)
{
    zs_hosts_comm *self = arg;
    zs_hosts_turns *turns = self->turns;
    zs_hosts_ticket *ticket;
    zs_clear_error();
    while ((ticket = next_ticket(turns)) != NULL && take_turn(self, ticket)) {
        const zs_comparison all = zs_turns_compare(ticket->turns, self->c10d.base.world);
        bool same = all.same && all.synced && all.unsynced < 0;
        hand_back(turns, ticket, same && ticket->begin != NULL && ticket->begin(self, ticket));
    }
    pthread_mutex_lock(&turns->lock);
    bool asked = turns->ends;
    if (!asked) snprintf(turns->why, sizeof turns->why, "%s", zs_last_message());
    turns->closed = true;
    pthread_cond_broadcast(&turns->changed);
    pthread_mutex_unlock(&turns->lock);
    if (!asked) zs_hosts_mark_failed(self, turns->why);
    return NULL;
}

/* Ends the thread, and if this rank cannot continue, the connections. */
static void end_thread(zs_hosts_turns *turns, bool hangs_up)
{
    if (!turns->runs) return;
    pthread_mutex_lock(&turns->lock);
    turns->ends = true;
    if (turns->awaited != NULL) zs_work_abort(turns->awaited);
    pthread_cond_broadcast(&turns->changed);
    pthread_mutex_unlock(&turns->lock);
    pthread_join(turns->thread, NULL);
    turns->runs = false;
    for (int i = 0; i < turns->n_wires && hangs_up; i++)
        if (turns->wires[i].receiving != NULL) zs_work_hang_up(turns->wires[i].receiving);
}

/* --- tickets, on the script's thread ------------------------------------------------------------------------------ */

void zs_hosts_enqueue(zs_hosts_comm *self, zs_hosts_ticket *ticket)
{
    zs_hosts_turns *turns = self->turns;
    ticket->state = ZS_HOSTS_QUEUED;
    pthread_mutex_lock(&turns->lock);
    ticket->next = ticket->urgent ? turns->first : NULL;
    if (ticket->urgent || turns->first == NULL)
        turns->first = ticket;
    else
        turns->last->next = ticket;
    if (ticket->next == NULL) turns->last = ticket;
    pthread_cond_broadcast(&turns->changed);
    pthread_mutex_unlock(&turns->lock);
}

void zs_hosts_go_on(zs_hosts_comm *self)
{
    pthread_mutex_lock(&self->turns->lock);
    self->turns->stopped = false;
    pthread_cond_broadcast(&self->turns->changed);
    pthread_mutex_unlock(&self->turns->lock);
}

void zs_hosts_take_back(zs_hosts_comm *self)
{
    pthread_mutex_lock(&self->turns->lock);
    self->turns->first = self->turns->last = NULL;
    self->turns->stopped = false;
    pthread_mutex_unlock(&self->turns->lock);
}

typedef struct awaited {
    zs_hosts_turns *turns;
    const zs_hosts_ticket *ticket;
} awaited;

static bool look(void *arg, double seconds)
{
    const awaited *it = arg;
    const struct timespec until = zs_clock_in(seconds);
    pthread_mutex_lock(&it->turns->lock);
    bool late = seconds <= 0;
    while (it->ticket->state == ZS_HOSTS_QUEUED && !it->turns->closed && !late)
        late = pthread_cond_timedwait(&it->turns->changed, &it->turns->lock, &until) != 0;
    bool over = it->ticket->state != ZS_HOSTS_QUEUED || it->turns->closed;
    pthread_mutex_unlock(&it->turns->lock);
    return over;
}

bool zs_hosts_has_turned(zs_hosts_comm *self, const zs_hosts_ticket *ticket)
{
    awaited it = {self->turns, ticket};
    return look(&it, 0);
}

zs_status zs_hosts_turns_fail(zs_hosts_comm *self, zs_status status)
{
    if (self->turns != NULL) {
        end_thread(self->turns, status != ZS_ERR_TORCH); /* Ctrl-C: the peers may get one, too */
        zs_hosts_take_back(self);
    }
    return zs_hosts_pass(self, status);
}

zs_status zs_hosts_wait_ticket(zs_hosts_comm *self, zs_hosts_ticket *ticket)
{
    awaited it = {self->turns, ticket};
    zs_c10d_arrival until = {look, &it, "other ranks have not reached this point", false};
    zs_status status = zs_c10d_watch_turn(&self->c10d, &ticket->mine, &until);
    if (status != ZS_OK) return zs_hosts_turns_fail(self, status);
    if (ticket->state != ZS_HOSTS_QUEUED) return ZS_OK;
    status = ZS_FAIL(ZS_ERR_PEER, "%s", self->turns->why);
    return zs_hosts_turns_fail(self, zs_c10d_fail(&self->c10d, &ticket->mine, status));
}

/* The `exchange` of zs_turns_ops. */
static zs_status exchange(zs_comm *comm, const zs_turn *mine, zs_turn *turns)
{
    zs_hosts_comm *self = (zs_hosts_comm *)comm;
    zs_hosts_ticket ticket = {.mine = *mine, .turns = turns, .urgent = true};
    zs_hosts_enqueue(self, &ticket);
    return zs_hosts_wait_ticket(self, &ticket);
}

/* --- birth and end ------------------------------------------------------------------------------------------------ */

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
    int error = pthread_create(&turns->thread, NULL, run, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error != 0)
        return ZS_FAIL(ZS_ERR_MEMORY,
                       "cannot start the thread that communicates with other hosts (%s): raise the limit on threads "
                       "(ulimit -u, or pids.max of the container)",
                       strerror(error));
    turns->runs = true;
    return ZS_OK;
}

zs_status zs_hosts_turns_new(zs_hosts_comm *self)
{
    if (!zs_group_has_messages(self->c10d.group)) return ZS_OK;
    size_t lanes = hosts_a_lane(self), bytes = (size_t)zs_hosts_per_host(self) * sizeof(zs_turn);
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
    zs_clock_condition(&turns->changed);
    pthread_mutex_init(&turns->lock, NULL);
    find_wires(self);
    size_t part = 2 * sizeof(zs_turn) + 2 * lanes * bytes;
    ZS_TRY(zs_comm_flat_new(self->local, zs_file_bucket_room(part), &turns->board));
    ZS_TRY(start_thread(self));
    turns->ops = zs_c10d_turns_ops;
    turns->ops.exchange = exchange;
    self->c10d.turns.ops = &turns->ops;
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
    pthread_cond_destroy(&turns->changed);
    free(turns->memory);
    free(turns);
    self->turns = NULL;
}
