"""The engine in Hugging Face models. Beside the speculative loops and the evaluation, nothing else imports transformers.

    patch        patching.py puts the seams into a model, once trial.py, rope.py and devices.py have found out what it does;
                 enterable.py refuses models, fitting.py policies that a model cannot do
    cache        cache.py is a transformers cache of layers of the engine (layer.py) and of transformers' own: of states
                 (states.py, ragged.py), of windows (window.py, held_window.py), of images (cross.py); indexed.py keeps a
                 model's own index, shared_index.py that of layers that read another's latents, packed_index.py one of
                 groups of tokens; rewind.py goes back; forgetful.py refuses passes that would lose states
    a pass       forward.py lends it a cache, mask.py the rule of its mask (shown.py: which a model reads and
                 narrows, shown_places.py), attention.py computes, replay.py reads a prompt again
    generate     generate.py says what it asks for; parts.py reads prompts in parts, ended.py has rows end before others,
                 outgrown.py begins texts again that are too long for their first rotation
    recording    recordable.py refuses what cannot be, compiled.py replays one recorded step (steps.py), held_index.py holds a
                 model's own index still for it, fused.py compiles what lies between two layers' attention

What versions and models do differently has files of its own: names.py, places.py, brought.py, previous.py, rope_deltas.py,
drafts.py.
"""
