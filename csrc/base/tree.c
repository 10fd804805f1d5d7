/* tree.c - see tree.h. */
#include "base/tree.h"

#include <stdlib.h>

static int least(int a, int b)
{
    return a < b ? a : b;
}

zs_leaf_run zs_tree_run(const zs_tree *tree, int rank)
{
    int share = tree->n_leaves / tree->world, rest = tree->n_leaves % tree->world;
    int begin = rank * share + least(rank, rest);
    return (zs_leaf_run){begin, begin + share + (rank < rest)};
}

int zs_tree_passes(const zs_tree *tree)
{
    zs_leaf_run first = zs_tree_run(tree, 0);
    return first.end - first.begin;
}

int zs_tree_leaf(const zs_tree *tree, int rank, int pass, bool *counts)
{
    zs_leaf_run run = zs_tree_run(tree, rank);
    int leaf = run.end - zs_tree_passes(tree) + pass;
    *counts = leaf >= run.begin;
    return *counts ? leaf : run.begin;
}

bool zs_tree_joins(const zs_tree *tree, zs_leaf_run left, zs_leaf_run right)
{
    int size = left.end - left.begin;
    if (left.end != right.begin || (size & (size - 1)) != 0 || left.begin % (2 * size) != 0) return false;
    return right.end == least(left.end + size, tree->n_leaves);
}

int zs_tree_cover(const zs_tree *tree, zs_leaf_run run, zs_leaf_run *nodes)
{
    int n = 0;
    for (int leaf = run.begin; leaf < run.end; leaf++) {
        zs_leaf_run last = {leaf, leaf + 1};
        while (n > 0 && zs_tree_joins(tree, nodes[n - 1], last))
            last.begin = nodes[--n].begin;
        nodes[n++] = last;
    }
    return n;
}

/* Appends to the order; `n_sums`: that are there before. */
static void append(zs_tree *tree, int what, int *n_sums)
{
    tree->order[tree->n_order++] = what;
    *n_sums += what == ZS_TREE_ADD ? -1 : 1;
    if (*n_sums > tree->depth) tree->depth = *n_sums;
}

/* All ranks' nodes, in order. */
typedef struct cover {
    zs_leaf_run *nodes; /* [n] */
    int *sources;       /* [n] rank * sections + section */
    int n;
} cover;

/* Appends what gives the node of leaves [begin, begin + size). */
static void add_up(zs_tree *tree, const cover *all, int *next, int begin, int size, int *n_sums)
{
    int end = least(begin + size, tree->n_leaves);
    zs_leaf_run here = all->nodes[*next];
    if (here.begin == begin && here.end == end) {
        append(tree, all->sources[(*next)++], n_sums);
        return;
    }
    size /= 2;
    add_up(tree, all, next, begin, size, n_sums);
    if (begin + size >= end) return;
    add_up(tree, all, next, begin + size, size, n_sums);
    append(tree, ZS_TREE_ADD, n_sums);
}

static zs_status put_in_order(zs_tree *tree, cover *all)
{
    int next = 0, n_sums = 0, size = 1;
    for (int r = 0; r < tree->world; r++) {
        zs_leaf_run nodes[ZS_TREE_RUN];
        int n = zs_tree_cover(tree, zs_tree_run(tree, r), nodes);
        for (int k = 0; k < n; k++) {
            all->nodes[all->n] = nodes[k];
            all->sources[all->n++] = r * tree->sections + zs_tree_section(k, n);
        }
    }
    tree->order = calloc(2 * (size_t)all->n, sizeof *tree->order);
    if (tree->order == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the order of a sum");
    while (size < tree->n_leaves)
        size *= 2;
    add_up(tree, all, &next, 0, size, &n_sums);
    return ZS_OK;
}

static void count_sections(zs_tree *tree)
{
    for (int r = 0; r < tree->world; r++) {
        zs_leaf_run nodes[ZS_TREE_RUN];
        int n = zs_tree_cover(tree, zs_tree_run(tree, r), nodes);
        if (n > tree->sections) tree->sections = n;
    }
}

zs_status zs_tree_new(int n_leaves, int world, zs_tree **out)
{
    if (n_leaves < world || n_leaves >= 1 << (ZS_TREE_LEVELS - 1))
        return ZS_FAIL(ZS_ERR_VALUE,
                       "micro_batches=%d: expected at least one for each of the %d ranks, and fewer than %d", n_leaves,
                       world, 1 << (ZS_TREE_LEVELS - 1));
    zs_tree *tree = calloc(1, sizeof *tree);
    if (tree == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the order of a sum");
    tree->n_leaves = n_leaves;
    tree->world = world;
    count_sections(tree);
    size_t most = (size_t)world * ZS_TREE_RUN;
    cover all = {calloc(most, sizeof *all.nodes), calloc(most, sizeof *all.sources), 0};
    zs_status status = ZS_OK;
    if (all.nodes == NULL || all.sources == NULL)
        status = ZS_FAIL(ZS_ERR_MEMORY, "out of memory allocating the order of a sum");
    ZS_THEN(status, put_in_order(tree, &all));
    free(all.nodes);
    free(all.sources);
    if (status == ZS_OK)
        *out = tree;
    else
        zs_tree_free(tree);
    return status;
}

void zs_tree_free(zs_tree *tree)
{
    if (tree == NULL) return;
    free(tree->order);
    free(tree);
}
