"""DDTREE as an out-of-tree speculative algorithm of SGLang: `--speculative-algorithm DDTREE`, nothing to patch.

SGLang finds `plugin.register` through the entry point `sglang.srt.plugins`. The modules below it divide the work:
`flags` and `settings` say what was asked for, `contract` what is used of SGLang, `algorithm` what the scheduler
may ask, and `worker` runs the rounds with `draft`, `proposal`, `verify`, `masks`, `sampling` and `commit`. This
package is the only one that imports sglang; `settings`, `masks`, `proposal`, `sampling` and `memory` do without
it."""
