# Raw data -> prepared domain (contract 1). Later rules depend on card.json, which holds the hashes of the other files:
# it stays small enough to be compared by content, whatever dates a copy or a pull gave the files.


rule prepare:
    input:
        src=lambda w: plan.code("prepare", domain=w.domain),
    output:
        card="data/prepared/{domain}/card.json",
        manifest="data/prepared/{domain}/manifest.csv",
        images="data/prepared/{domain}/images.npy",
        masks="data/prepared/{domain}/masks.npz",
        native="data/prepared/{domain}/native.zip",
    log:
        "logs/prepare/{domain}.log",
    resources:
        mem_mb=lambda w, attempt: 2000 * attempt,
        runtime=lambda w, attempt: 240 * attempt,
    params:
        block=lambda w: plan.prepare_params(w.domain),
        card=lambda w: plan.card(w.domain),
        # A path is no content: taking `output` keeps it out of what triggers a re-run.
        root=lambda w, output: plan.root(w.domain),
        out="data/prepared/{domain}",
        problems="logs/prepare/{domain}.problems.csv",
    message:
        "prepare {wildcards.domain}"
    shell:
        "anomed prepare {wildcards.domain:q} --params {params.block:q} --root={params.root:q} --out {params.out:q}"
        " --problems {params.problems:q} > {log:q} 2>&1"
