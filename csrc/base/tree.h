/* tree.h - the order of adding the gradients of a step's micro-batches, the same for any number of ranks.
 *
 * The micro-batches are the leaves of one binary tree: node (level, j) is the sum of leaves j << level to
 * (j + 1) << level, or to the last leaf. Each rank computes a run of neighboring leaves, adds them up to the largest
 * nodes that its run covers, and sends these; the owner of a shard adds the ranks' nodes up to the root.
 */
#ifndef ZS_TREE_H
#define ZS_TREE_H

#include "base/status.h"

#include <stdbool.h>
#include <stdint.h>

enum {
    ZS_TREE_LEVELS = 16,             /* of nodes; so a tree has at most 2^15 leaves */
    ZS_TREE_RUN = 2 * ZS_TREE_LEVELS /* nodes that cover a run, at most */
};

/* Leaves `begin` to `end` (exclusive), or the sum of these. */
typedef struct zs_leaf_run {
    int begin, end;
} zs_leaf_run;

typedef struct zs_tree {
    int n_leaves, world;
    int sections; /* nodes of the rank that has most */
    int depth;    /* sums that are kept at a time while nodes are added up */
    int *order;   /* [n_order] adds the ranks' nodes: a node as rank * sections + section, or ZS_TREE_ADD; owned */
    size_t n_order;
} zs_tree;

enum { ZS_TREE_ADD = -1 }; /* the last two sums become one */

/* New tree. ZS_ERR_VALUE for fewer leaves than ranks, or too many. */
zs_status zs_tree_new(int n_leaves, int world, zs_tree **out);

/* Frees it; NULL allowed. */
void zs_tree_free(zs_tree *tree);

/* The leaves of a rank: an equal share, where the first ranks have one more if there is a rest. */
zs_leaf_run zs_tree_run(const zs_tree *tree, int rank);

/* The forwards that each rank runs in a step: the leaves of the rank that has most. */
int zs_tree_passes(const zs_tree *tree);

/* The leaf that a rank computes in forward `pass` of a step. A rank with fewer leaves than passes computes its first
 * one twice, and its gradient `counts` once. */
int zs_tree_leaf(const zs_tree *tree, int rank, int pass, bool *counts);

/* Are these two neighbors the children of one node? */
bool zs_tree_joins(const zs_tree *tree, zs_leaf_run left, zs_leaf_run right);

/* The nodes that cover a run, in order, to nodes[ZS_TREE_RUN]; returns how many. */
int zs_tree_cover(const zs_tree *tree, zs_leaf_run run, zs_leaf_run *nodes);

/* The sections of a bucket; `tree` is NULL where gradients are added in the order of ranks. */
static inline int zs_tree_sections(const zs_tree *tree)
{
    return tree != NULL ? tree->sections : 1;
}

/* The section of a bucket for node `k` of a run of `n`: the last one, which is complete last, has the first. */
static inline int zs_tree_section(int k, int n)
{
    return k == n - 1 ? 0 : k + 1;
}

#endif
