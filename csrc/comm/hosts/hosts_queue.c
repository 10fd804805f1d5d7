/* hosts_queue.c - queued gathers and rounds, which begin when their turn comes. See hosts.h.
 *
 * Two calls queue a collective and find out whether all ranks agree on it. Between them the script computes, while the
 * thread of hosts_turns.c sends one turn after the other and begins the collectives that all agree on. The first call
 * that finds a failure reports it; then everything queued later has failed on all ranks, as none of it was received. */
#include "comm/hosts/hosts.h"

#include <stdio.h>
#include <string.h>

static void fail(zs_hosts_op *op, zs_status status)
{
    op->status = status;
    snprintf(op->why, sizeof op->why, "%s", zs_last_message());
}

/* A ticket's `begin`. The script's thread reports a failure here. */
static bool begin(zs_hosts_comm *self, zs_hosts_ticket *ticket)
{
    zs_hosts_op *op = (zs_hosts_op *)(void *)ticket;
    if (op->acts->can != NULL && !op->acts->can(self, op)) return false;
    zs_status status = op->acts->begin(self, op);
    if (status != ZS_OK) fail(op, status);
    zs_clear_error();
    return true;
}

/* All ranks see that their turns differ, or that the thread cannot begin it. */
static zs_status agree(zs_hosts_comm *self, zs_hosts_op *op)
{
    zs_comm *base = &self->c10d.base;
    zs_model now = base->model;
    uint64_t reading = base->reading;
    base->model = op->model;
    base->reading = op->ticket.mine.reading;
    zs_status status = zs_turns_agree_on(base, &op->ticket.mine, op->ticket.turns);
    base->model = now;
    base->reading = reading;
    return status;
}

/* If one rank cannot start an agreed operation, the group is unusable. */
static zs_status lose(zs_hosts_comm *self, const zs_hosts_op *op, zs_status status)
{
    return zs_hosts_turns_fail(self, zs_c10d_fail(&self->c10d, &op->ticket.mine, status));
}

static zs_status begin_here(zs_hosts_comm *self, zs_hosts_op *op)
{
    zs_status status = op->acts->begin_here(self, op);
    return status == ZS_OK ? ZS_OK : lose(self, op, status);
}

/* Waits until all ranks have sent the turn of the first queued op, and makes sure that it has begun. */
static zs_status wait_first(zs_hosts_comm *self)
{
    zs_hosts_op *op = self->first;
    ZS_TRY(zs_hosts_wait_ticket(self, &op->ticket));
    if (op->ticket.state == ZS_HOSTS_BEGUN) {
        if (op->status == ZS_OK) return ZS_OK;
        return lose(self, op, ZS_FAIL(op->status, "%s", op->why));
    }
    ZS_TRY(agree(self, op));
    ZS_TRY(begin_here(self, op));
    zs_hosts_go_on(self);
    return ZS_OK;
}

/* No queued op takes place. */
static void fail_all(zs_hosts_comm *self, zs_status status)
{
    zs_hosts_take_back(self);
    while (self->first != NULL) {
        zs_hosts_op *op = self->first;
        self->first = op->next;
        op->queued = false;
        fail(op, status == ZS_ERR_TORCH ? ZS_ERR_PEER : status); /* a Python exception is reported once */
        if (op->acts->undo != NULL) op->acts->undo(self, op);
    }
}

zs_status zs_hosts_wait_until(zs_hosts_comm *self, const zs_hosts_op *end)
{
    if (zs_c10d_is_forked(&self->c10d))
        return zs_c10d_check_usable(&self->c10d.base); /* the thread and its locks belong to the parent */
    while (self->first != NULL && (end == NULL || end->queued)) {
        zs_status status = wait_first(self);
        if (status != ZS_OK) {
            self->c10d.base.failed = true;
            fail_all(self, status);
            return status;
        }
        self->first->queued = false;
        self->first = self->first->next;
    }
    return ZS_OK;
}

zs_status zs_hosts_wait_queued(zs_c10d_comm *comm)
{
    return zs_hosts_wait_until((zs_hosts_comm *)comm, NULL);
}

bool zs_hosts_has_begun(zs_hosts_comm *self, const zs_hosts_op *op)
{
    return !op->queued || zs_c10d_is_forked(&self->c10d) || zs_hosts_has_turned(self, &op->ticket);
}

zs_status zs_hosts_op_failure(const zs_hosts_op *op)
{
    return op->status == ZS_OK ? ZS_OK : ZS_FAIL(op->status, "%s", op->why);
}

zs_status zs_hosts_op_enqueue(zs_hosts_comm *self, zs_hosts_op *op, const zs_turn *turn)
{
    op->status = ZS_OK;
    op->model = self->c10d.base.model;
    op->ticket.mine = zs_turn_to_send(&self->c10d.base, turn);
    op->ticket.begin = begin;
    op->ticket.urgent = false;
    op->next = NULL;
    if (self->turns == NULL) {
        ZS_TRY(zs_c10d_agree(&self->c10d, turn));
        zs_status status = op->acts->begin_here(self, op);
        return status == ZS_OK ? ZS_OK : zs_c10d_fail(&self->c10d, turn, status);
    }
    ZS_TRY(zs_c10d_check_usable(&self->c10d.base));
    if (self->first == NULL) zs_hosts_go_on(self);
    zs_hosts_op **at = &self->first;
    while (*at != NULL)
        at = &(*at)->next;
    *at = op;
    op->queued = true;
    zs_hosts_enqueue(self, &op->ticket);
    return ZS_OK;
}
