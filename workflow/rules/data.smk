# Raw data -> prepared domain (contract 1): `images` where the source gives images; `spatial`, one job a shard of the
# volumes, then `intensity`, where it gives volumes, so that another window moves no voxel. Later rules depend on
# card.json, which holds the hashes of the other files: it stays small enough to be compared by content, whatever dates
# a copy or a pull gave the files.


rule images:
    input:
        src=lambda w: plan.code("images", domain=w.domain),
    output:
        card="data/prepared/{domain}/card.json",
        manifest="data/prepared/{domain}/manifest.csv",
        images="data/prepared/{domain}/images.npy",
        masks="data/prepared/{domain}/masks.npz",
        native="data/prepared/{domain}/native.zip",
        clinical="data/prepared/{domain}/clinical.jsonl",
    log:
        "logs/prepare/{domain}.log",
    wildcard_constraints:
        domain=one_of(name for name in plan.domains if name not in plan.volumetric),
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
        "anomed prepare images {wildcards.domain:q} --params {params.block:q} --root={params.root:q}"
        " --out {params.out:q} --problems {params.problems:q} > {log:q} 2>&1"


# The volumes lie in data/prepared/_spatial/<domain>/<subject>/ and are no declared output: a killed shard goes on where
# it stopped, and another number of shards does none of them twice.
rule spatial:
    input:
        src=lambda w: plan.code("spatial", domain=w.domain),
    output:
        "data/prepared/_spatial/{domain}/{shard}.json",
    log:
        "logs/spatial/{domain}/{shard}.log",
    wildcard_constraints:
        domain=one_of(plan.volumetric),
        shard=r"\d+-of-\d+",
    resources:
        mem_mb=lambda w, attempt: 4000 * attempt,
        runtime=lambda w, attempt: 1440 * attempt,
    params:
        block=lambda w: plan.spatial_params(w.domain),
        files=lambda w, output: plan.chain_paths(w.domain),
        root=lambda w, output: plan.root(w.domain),
        out="data/prepared/_spatial/{domain}",
        problems="logs/spatial/{domain}/{shard}.problems.csv",
    message:
        "spatial {wildcards.domain} {wildcards.shard}"
    shell:
        "anomed prepare spatial {wildcards.domain:q} {wildcards.shard} --params {params.block:q} --files {params.files:q}"
        " --root={params.root:q} --out {params.out:q} --problems {params.problems:q} > {log:q} 2>&1"


rule intensity:
    input:
        src=lambda w: plan.code("intensity", domain=w.domain),
        shards=lambda w: expand(
            "data/prepared/_spatial/{domain}/{shard}.json",
            domain=w.domain,
            shard=plan.shards(w.domain),
        ),
    output:
        card="data/prepared/{domain}/card.json",
        manifest="data/prepared/{domain}/manifest.csv",
        images="data/prepared/{domain}/images.npy",
        masks="data/prepared/{domain}/masks.npz",
        native="data/prepared/{domain}/native.zip",
        clinical="data/prepared/{domain}/clinical.jsonl",
        page="data/prepared/{domain}/qc.html",
    log:
        "logs/prepare/{domain}.log",
    wildcard_constraints:
        domain=one_of(plan.volumetric),
    resources:
        mem_mb=lambda w, attempt: 3000 * attempt,
        runtime=lambda w, attempt: 240 * attempt,
    params:
        block=lambda w: plan.prepare_params(w.domain),
        card=lambda w: plan.card(w.domain),
        root=lambda w, output: plan.root(w.domain),
        volumes="data/prepared/_spatial/{domain}",
        out="data/prepared/{domain}",
        problems="logs/prepare/{domain}.problems.csv",
    message:
        "intensity {wildcards.domain}"
    shell:
        "anomed prepare intensity {wildcards.domain:q} --params {params.block:q} --root={params.root:q}"
        " --volumes {params.volumes:q} --out {params.out:q} --problems {params.problems:q} > {log:q} 2>&1"
