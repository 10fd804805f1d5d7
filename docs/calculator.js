// The memory of a rank, as zshard.plan() predicts it, in the browser (calculator.md).
//
// The planner runs zshard's schedule dry and traces the model. Here are formulas for what comes of it
// for a decoder; tests/project/test_calculator.py holds them against the planner. What Python knows and
// a formula cannot (GPUs, limits, activations) is in calculator_data.js (docs/tools/calculator_data.py).
"use strict";
var zshardCalculator = (() => {
  const facts = zshardFacts;
  const GIB = 2 ** 30;
  const STRATEGIES = ["full_shard", "shard_grad_op", "zero1", "no_shard", "hybrid_shard", "hybrid_full"];
  const STATE_TENSORS = {adamw: 2, sgd: 0, none: 0}; // of float32, per parameter; adamw8bit: see stateBytes
  const sum = (list, of = (x) => x) => list.reduce((total, each) => total + of(each), 0);
  const roundUp = (value, step) => Math.ceil(value / step) * step;

  // --- parameters ---------------------------------------------------------------------------------
  // The sizes of the parameters, in order (zshard/extras/planner/decoder.py).
  function blockParams(c) {
    const kv = (c.kv_heads * c.width) / c.heads, llama = c.block === "llama";
    const norm = llama ? [c.width] : [c.width, c.width];
    const linear = (from, to) => (c.bias ? [from * to, to] : [from * to]);
    const qkv = llama ? [c.width, kv, kv] : [c.width + 2 * kv];
    return [
      ...norm, ...norm, ...qkv.flatMap((size) => linear(c.width, size)), ...linear(c.width, c.width),
      ...(llama ? linear(c.width, c.ffn) : []), ...linear(c.width, c.ffn), ...linear(c.ffn, c.width),
    ];
  }

  // The units of auto_wrap_policy="auto" (zshard/wrap/auto.py): each block; the embedding, the head
  // and the positions too if they are large; all else is the root's.
  function unitsOf(c) {
    const block = blockParams(c), words = [c.vocab * c.width], llama = c.block === "llama";
    const norm = llama ? [c.width] : [c.width, c.width], positions = llama ? [] : [c.seq * c.width];
    const total = c.layers * sum(block) + sum([...words, ...positions, ...norm, ...(c.tied ? [] : words)]);
    const large = (params) => sum(params) >= Math.min(total / 100, sum(block) / 4);
    const apart = !c.tied && large(words) ? words : [];
    const rest = apart.length > 0 ? [] : words; // a tied weight is used by two, and so is the root's
    const root = [...rest, ...(large(positions) ? [] : positions), ...norm, ...(c.tied ? [] : rest)];
    return {block, total, embed: apart, head: apart, positions: large(positions) ? positions : [], root};
  }

  // The elements of one rank's shard of a unit: each parameter begins at a multiple of 32 elements, and
  // so does each shard (csrc/base/layout.c).
  const shardOf = (params, ranks) => roundUp(Math.ceil(sum(params, (n) => roundUp(n, 32)) / ranks), 32);

  // The optimizer's state of rank 0 for one unit. `shard` elements of it are this rank's.
  function stateBytes(c, params, shard) {
    let begin = 0, bytes = 0;
    for (const numel of params) {
      const own = Math.max(0, Math.min(numel, shard - begin));
      if (c.optimizer !== "adamw8bit") bytes += 4 * STATE_TENSORS[c.optimizer] * own;
      else bytes += 2 * (numel < facts.smallest8bit ? 4 * own : own + Math.ceil(own / facts.group8bit));
      begin += roundUp(numel, 32);
    }
    return bytes;
  }

  // --- what a step borrows ------------------------------------------------------------------------
  // Memory that the units of a step take turns to use, in elements: slots for gathered parameters, buckets for
  // full gradients. b, e, r: all of a block, of the embedding (or the head), of the root; e is 0 if they are the
  // root's. The root stays gathered.
  function borrowed(c, b, e, r, whole) {
    const large = Math.max(b, e), small = Math.min(b, e);
    // While a unit computes, the next one is gathered, into the other one of two slots; both have been the largest
    // unit's after some steps. Whole parameters are only cast, and always in turn: a pass over an odd number of blocks
    // begins and ends in the same slot.
    const slots = r + large + (whole && c.layers % 2 === 1 ? b : large);
    // The root's gradients come first and last: they have a bucket of their own. The others take turns in two, and a
    // third is needed where sizes change. A root that is larger than a block counts as one of the two.
    const buckets = e === 0 && r > b ? r + b : r + 2 * large + small;
    return {slots, buckets};
  }

  // The same on one GPU, where nothing is gathered ahead, and a sum is there at once: all units that fit into the
  // head's bucket share it.
  const borrowedAlone = (b, e, r) =>
    ({slots: r + Math.max(b, e), buckets: e > b ? e : b + (e || r)});

  // --- activations --------------------------------------------------------------------------------
  // The largest sum of activations and gradients, as {activations, grads}. The tool says which moments
  // may be the peak of three layers, and what each further layer adds.
  function peakOf(c, units, grads) {
    const n = c.micro_batch * c.seq, w = c.width, k = (c.kv_heads * w) / c.heads;
    const products = {
      n, nh: n * c.heads, nw: n * w, nk: n * k, nf: n * c.ffn, nv: n * c.vocab,
      ww: w * w, wk: w * k, wf: w * c.ffn, wv: w * c.vocab, sw: c.seq * w,
    };
    const bytes = (terms) => sum(Object.entries(terms), ([name, times]) => times * products[name]);
    const traced = facts.activations[[c.block, k < w ? "grouped" : "all", c.checkpointing, c.precision].join(" ")];
    // The first gradient of a tied weight, the head's, waits for the embedding's; both and their sum meet.
    const tied = c.tied ? products.wv * (c.precision === "fp32" ? 4 : 2) : 0;
    const layer = bytes(traced.layer), more = c.layers - 3, head = sum(units.head), block = sum(units.block);
    let best = {activations: 0, grads};
    const meet = (activations, arrived) => {
      const there = c.accumulate > 1 ? grads : Math.trunc((grads / units.total) * arrived);
      if (activations + there > best.activations + best.grads) best = {activations, grads: there};
    };
    for (const each of traced.none) meet(bytes(each) + more * layer, 0);
    for (const each of traced.last) meet(bytes(each) + more * layer + tied, head);
    for (const blocks of more >= 0 ? [0, more] : []) // above the first block: gradients have not come
      for (const each of traced.middle) meet(bytes(each) + blocks * layer + tied, head + (more + 1 - blocks) * block);
    for (const each of traced.first) meet(bytes(each) + tied, head + (more + 2) * block);
    for (const each of traced.embed) meet(bytes(each) + tied, head + (more + 3) * block);
    meet(3 * tied, head + (more + 3) * block);
    return best;
  }

  // --- a rank's memory ----------------------------------------------------------------------------
  // The bytes of each part, and their total. c: see FIELDS; it has passed check().
  function memory(c, strategy) {
    const units = unitsOf(c), all = [units.root, units.embed, units.head].filter((each) => each.length > 0);
    const ranks = strategy === "hybrid_shard" ? c.per_host : c.gpus; // that share the parameters
    const whole = strategy === "no_shard", low = c.precision === "bf16", computed = low ? 2 : 4;
    const ofUnits = (of) => sum(all, of) + c.layers * of(units.block);
    const full = (params) => (params.length > 0 ? shardOf(params, ranks) * ranks : 0);
    const elements = ofUnits(full), mine = whole ? elements : elements / ranks;

    const parts = {kept: 0, transport: 0};
    parts.shards = 4 * mine + (low && !whole ? 2 * mine : 0); // float32, and a copy to gather from
    if (strategy === "zero1") parts.kept = computed * elements;
    if (strategy === "hybrid_full") parts.kept = (computed * elements) / c.per_host;
    parts.optimizer = ofUnits((params) => stateBytes(c, params, whole ? Infinity : shardOf(params, ranks)));

    const sizes = [units.block, units.embed, units.root].map(full);
    const turns = c.gpus === 1 ? borrowedAlone(...sizes) : borrowed(c, ...sizes, whole);
    parts.slots = computed * (strategy === "shard_grad_op" ? elements : turns.slots);
    if (strategy === "zero1" || (whole && !low)) parts.slots = 0; // the copies that stay are used
    const sent = whole ? 4 : computed; // bytes of an element of a gradient on its way
    const plain = c.gpus === 1 && !low; // as without zshard
    parts.buckets = plain ? 0 : sent * turns.buckets;
    // Each rank receives its part from all others: together as much as all shards.
    if (c.gpus > 1) parts.transport = whole ? sent * Math.max(...sizes) : (sent * turns.buckets * c.gpus) / ranks;
    Object.assign(parts, peakOf(c, units, plain ? 0 : 4 * mine));
    parts.total = sum(Object.values(parts));
    return parts;
  }

  // --- what a user may ask ------------------------------------------------------------------------
  const NAMED = { // models to start from, in the order of MODEL
    "Llama 3 8B": ["llama", 32, 4096, 32, 8, 14336, 128256, 8192, "no", "no"],
    "Llama 3 70B": ["llama", 80, 8192, 64, 8, 28672, 128256, 8192, "no", "no"],
    "GPT-2 124M": ["gpt", 12, 768, 12, 12, 3072, 50257, 1024, "yes", "yes"],
  };

  // [name, words, default: a number, or the values to choose from, the default first]
  const FIELDS = {
    Model: [
      ["named", "preset", ["custom", ...Object.keys(NAMED)]],
      ["block", "architecture", ["llama", "gpt"]], ["layers", "layers", 32], ["width", "hidden size", 4096],
      ["heads", "attention heads", 32], ["kv_heads", "KV heads", 8], ["ffn", "intermediate size", 14336],
      ["vocab", "vocabulary size", 128256], ["seq", "sequence length", 8192],
      ["tied", "tied embeddings", ["no", "yes"]], ["bias", "biases", ["no", "yes"]],
    ],
    GPUs: [
      ["gpu", "GPU", ["h100", ...Object.keys(facts.gpus).filter((name) => name !== "h100")]],
      ["gpus", "number of GPUs", 16], ["per_host", "GPUs per node", 8],
    ],
    Training: [
      ["strategy", "strategy", STRATEGIES], ["precision", "precision", ["bf16", "fp32"]],
      ["optimizer", "optimizer", ["adamw", "adamw8bit", "sgd", "none"]],
      ["checkpointing", "activation checkpointing", ["full", "selective", "none"]],
      ["micro_batch", "micro-batch size", 1], ["accumulate", "gradient accumulation steps", 1],
    ],
  };
  const ALL = Object.values(FIELDS).flat().filter(([name]) => name !== "named");
  const MODEL = FIELDS.Model.slice(1).map(([name]) => name);

  // The strategies that make sense, as zshard.plan() has them. The hybrid ones shard within a node.
  const offered = ({gpus, per_host}) =>
    gpus === 1 ? ["no_shard"] : STRATEGIES.slice(0, gpus > per_host && per_host > 1 ? 6 : 4);

  // What is asked, from the text of each field, and what is wrong with it ("": nothing).
  function read(texts) {
    const c = {}, wrong = [];
    for (const [name, words, usual] of ALL) {
      const text = (texts[name] ?? "").trim(), choices = Array.isArray(usual);
      c[name] = choices ? text : Number(text);
      if (choices && !usual.includes(text)) wrong.push(`${words} must be one of ${usual.join(", ")}, got ${text || "nothing"}`);
      if (!choices && !(/^\d+$/.test(text) && c[name] >= 1 && c[name] <= 1e9))
        wrong.push(`${words} must be a whole number from 1 to 1,000,000,000, got ${text || "nothing"}`);
    }
    Object.assign(c, {tied: c.tied === "yes", bias: c.bias === "yes"});
    return [c, wrong[0] || check(c)];
  }

  function check(c) {
    if (c.width % (2 * c.heads)) return `hidden size ${c.width} must be a multiple of 2 x attention heads, ${2 * c.heads}`;
    if (c.heads % c.kv_heads) return `attention heads ${c.heads} must be a multiple of KV heads, ${c.kv_heads}`;
    if (c.gpus % c.per_host) return `number of GPUs ${c.gpus} must be a multiple of GPUs per node, ${c.per_host}`;
    if (c.layers < 2) return "this page needs at least 2 layers: use zshard.plan()";
    const {block, positions, total} = unitsOf(c), share = sum(block) / total;
    if (c.layers * share < 0.05 || sum(block) < Math.min(total / 1000, 2 ** 20) || positions.length > 0)
      return "the embeddings are so large compared with the blocks that zshard chooses other units: use zshard.plan()";
    if (!offered(c).includes(c.strategy))
      return c.gpus === 1 ? "one GPU has nothing to shard: choose no_shard"
        : `${c.strategy} needs several nodes with several GPUs each: choose ${offered(c).join(", ")}`;
    return "";
  }

  const room = (c) => facts.gpus[c.gpu] * GIB; // without what CUDA and NCCL take
  const fits = (c, parts) => facts.gap * parts.total <= room(c);

  function line(c) {
    const words = ["model"];
    if (c.strategy !== "full_shard") words.push(`strategy="${c.strategy}"`);
    if (c.precision === "bf16") words.push("mixed_precision=MixedPrecision(torch.bfloat16)");
    return `FSDP(${words.join(", ")})${facts.comments[c.checkpointing] ?? ""}`;
  }

  // --- the page -----------------------------------------------------------------------------------
  function make(tag, properties = {}, ...inside) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...inside);
    return made;
  }

  const idOf = (name) => `calculator-${name}`;
  const field = (name) => document.getElementById(idOf(name)); // or another part of the page
  const gib = (bytes) => (bytes / GIB).toFixed(bytes > 0 && bytes < GIB / 10 ? 3 : 1);

  function control([name, words, usual]) {
    const id = idOf(name), options = [usual].flat().map((each) => make("option", {}, each));
    const made = Array.isArray(usual) ? make("select", {id}, ...options) : make("input", {id, inputMode: "numeric"});
    return make("div", {}, make("label", {htmlFor: id}, words), made);
  }

  function bar(parts, scale, limit) {
    const pieces = Object.entries(facts.parts).map(([part, [words, colour]]) => {
      const style = `width: ${(100 * parts[part]) / scale}%; background: ${colour}`;
      return make("span", {title: `${words}: ${gib(parts[part])} GiB`, style});
    });
    const mark = make("i", {title: `limit: ${gib(limit)} GiB`, style: `left: ${(100 * limit) / scale}%`});
    return make("div", {className: "calculator-bar"}, ...pieces, mark);
  }

  const row = (cells, kind = "td") => make("tr", {}, ...cells.map((each) => make(kind, {}, each)));
  const table = (head, rows) => make("table", {className: "calculator-table"}, row(head, "th"), ...rows);

  function tables(c) {
    const found = offered(c).map((name) => [name, memory(c, name)]), chosen = memory(c, c.strategy);
    const limit = room(c) / facts.gap, scale = 1.02 * Math.max(limit, ...found.map(([, parts]) => parts.total));
    const ways = found.map(([name, parts]) => {
      const shown = name === c.strategy ? make("strong", {}, name) : name;
      return row([shown, gib(parts.total), bar(parts, scale, limit), fits(c, parts) ? "fits" : "does not fit"]);
    });
    const swatch = (colour) => make("span", {className: "calculator-swatch", style: `background: ${colour}`});
    const legend = make("p", {className: "calculator-legend"});
    for (const [part, [words, colour]] of Object.entries(facts.parts))
      legend.append(make("span", {title: part}, swatch(colour), ` ${words}`), " ");
    const pieces = Object.entries(facts.parts).map(([part, [words, colour]]) =>
      row([swatch(colour), make("code", {}, part), words, gib(chosen[part])]));
    pieces.push(row(["", make("code", {}, "total"), "", gib(chosen.total)]));
    return [
      legend,
      table(["strategy", "GiB per GPU", `limit: ${gib(limit)} GiB`, ""], ways),
      make("pre", {}, make("code", {}, line(c))),
      table(["", "part", `with ${c.strategy}`, "GiB"], pieces),
    ];
  }

  function show(texts) {
    const [c, wrong] = read(texts), model = MODEL.map((name) => texts[name]).join();
    field("named").value = Object.keys(NAMED).find((name) => NAMED[name].join() === model) ?? "custom";
    field("wrong").textContent = wrong;
    field("result").replaceChildren(...(wrong ? [] : tables(c)));
  }

  // Fills the fields as the address says, or with what is usual.
  function fill() {
    const given = new URLSearchParams(location.hash.slice(1));
    const texts = Object.fromEntries(ALL.map(([name, , usual]) => [name, given.get(name) ?? `${[usual].flat()[0]}`]));
    for (const name in texts) field(name).value = texts[name];
    show(texts);
  }

  function changed(event) {
    const named = event.target === field("named") ? NAMED[event.target.value] ?? [] : [];
    named.forEach((value, i) => { field(MODEL[i]).value = value; });
    const texts = Object.fromEntries(ALL.map(([name]) => [name, field(name).value]));
    show(texts);
    history.replaceState(null, "", `#${new URLSearchParams(texts)}`);
  }

  function start(place) {
    for (const [title, fields] of Object.entries(FIELDS))
      place.append(make("fieldset", {}, make("legend", {}, title), ...fields.map(control)));
    place.append(make("p", {id: idOf("wrong"), role: "alert"}), make("div", {id: idOf("result")}));
    place.addEventListener("input", changed);
    window.addEventListener("hashchange", () => location.hash.includes("=") && fill()); // else it is a heading's
    fill();
  }

  if (typeof document !== "undefined") start(document.getElementById("calculator"));
  return {read, memory, line, fits, offered};
})();
