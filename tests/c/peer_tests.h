/* peer_tests.h - what the tests of the transport "peer" share: a transport over the stand-in for libcuda, and gathers compared.
 *
 * The one idea: the tests are one program, test_backend_peer.c, of three files; bodies that are not in that one are declared here.
 */
#ifndef ZS_TEST_PEER_TESTS_H
#define ZS_TEST_PEER_TESTS_H

#include "any_transport.h"

#include "comm/peer/peer.h"
#include "device/device_cuda.h"

static zs_comm *hosts; /* below env->comm */

/* From here to end_gpu, env->comm is the transport "peer" over what it was. */
static inline void begin_gpu(rank_env *env)
{
    const zs_device *device = NULL;
    zs_backend *backend = NULL;
    setenv("FAKE_CUDA_DELAY_US", "20", 1);
    hosts = env->comm;
    OK(zs_device_cuda(0, true, &device));
    OK(zs_backend_peer_new(hosts, device, &backend));
    OK(zs_comm_gpu_new(hosts, backend, &env->comm));
}

/* Leaves it. */
static inline void end_gpu(rank_env *env)
{
    zs_comm_release(env->comm);
    env->comm = hosts;
}

/* The full buffer has the pattern of each rank: seed, seed + 1, ... */
static inline void compare_full(rank_env *env, const char *full, size_t bytes, unsigned seed)
{
    for (int r = 0; r < env->world; r++)
        CHECK(has_pattern(full + (size_t)r * bytes, bytes, seed + (unsigned)r));
}

/* Of peer_rounds.c. */
void parts_are_shared(rank_env *env);
void streams_work_late(rank_env *env);
void buckets_change_hands(rank_env *env);
void units_come_and_go(rank_env *env);
void too_many_units_are_refused(rank_env *env);

/* Of peer_failures.c. */
void killed_rank_lets_streams_go(rank_env *env);
void absent_rank_is_a_timeout(rank_env *env);
void failing_call_lets_the_peers_go(rank_env *env);
void birth_fails_on_all_ranks(rank_env *env);
void child_is_refused(rank_env *env);
void two_transports(rank_env *env);
void first_move_that_differs_is_named(rank_env *env);
void move_that_is_missing_is_named(rank_env *env);
void moves_of_long_ago_are_not_named(rank_env *env);
void memory_outlives_its_mappings(rank_env *env);
void late_peer_keeps_its_mappings(rank_env *env);

#endif
