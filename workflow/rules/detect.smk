# Prepared domain -> model (contract 2) -> predictions (contract 3); `adopt` takes predictions that were imported. A job replaces its folder whole; the files named here
# are those that later rules compare by content. Large ones are `ancient`: the card beside them speaks for them.


rule fit:
    input:
        src=lambda w: plan.code("fit", system=w.system),
        card=rules.images.output.card,
        data=ancient(
            [
                rules.images.output.manifest,
                rules.images.output.images,
                rules.images.output.masks,
                rules.images.output.clinical,
            ]
        ),
    output:
        card="models/{domain}/{system}/{seed}/run.json",
        state="models/{domain}/{system}/{seed}/state.safetensors",
    log:
        "logs/fit/{domain}/{system}/{seed}.log",
    wildcard_constraints:
        system=one_of(plan.params.methods),
    threads: lambda w: plan.torch_threads(w.system)
    resources:
        gpu=lambda w: plan.gpu(w.system),
        mem_mb=lambda w, attempt: plan.memory_mb(w.domain, w.system) * attempt,
        runtime=lambda w, attempt: 240 * attempt,
    params:
        block=lambda w: plan.fit_params(w.domain, w.system),
        device=lambda w, output: plan.params.run.device,
        data="data/prepared/{domain}",
        out="models/{domain}/{system}/{seed}",
        checkpoint="work/fit/{domain}/{system}/{seed}.pt",
    message:
        "fit {wildcards.system} on {wildcards.domain}, seed {wildcards.seed}"
    shell:
        "anomed fit {wildcards.system:q} --params {params.block:q} --seed {wildcards.seed} --data {params.data:q}"
        " --out {params.out:q} --device {params.device} --checkpoint {params.checkpoint:q} > {log:q} 2>&1"


rule predict:
    input:
        src=lambda w: plan.code("predict", system=w.system),
        card=rules.images.output.card,
        data=ancient(
            [
                rules.images.output.manifest,
                rules.images.output.images,
                rules.images.output.masks,
                rules.images.output.clinical,
            ]
        ),
        model=lambda w: plan.model(w) + "/run.json",
        state=lambda w: ancient(plan.model(w) + "/state.safetensors"),
    output:
        card="runs/{domain}/{system}/{seed}/run.json",
        scores="runs/{domain}/{system}/{seed}/scores.csv",
    log:
        "logs/predict/{domain}/{system}/{seed}.log",
    wildcard_constraints:
        system=one_of(plan.params.methods),
    threads: lambda w: plan.torch_threads(w.system)
    resources:
        gpu=lambda w: plan.gpu(w.system),
        mem_mb=lambda w, attempt: plan.memory_mb(w.domain, w.system) * attempt,
        runtime=lambda w, attempt: 120 * attempt,
    params:
        device=lambda w, output: plan.params.run.device,
        data="data/prepared/{domain}",
        model=lambda w: plan.model(w),
        train=lambda w: plan.train_data(w.domain),
        out="runs/{domain}/{system}/{seed}",
    message:
        "predict {wildcards.system} on {wildcards.domain}, seed {wildcards.seed}"
    shell:
        "anomed predict --model {params.model:q} --data {params.data:q} --train={params.train:q} --out {params.out:q}"
        " --device {params.device} > {log:q} 2>&1"


rule adopt:
    input:
        src=plan.code("adopt"),
        card=rules.images.output.card,
        data=ancient([rules.images.output.manifest, rules.images.output.masks]),
    output:
        card="runs/{domain}/{system}/{seed}/run.json",
        scores="runs/{domain}/{system}/{seed}/scores.csv",
    log:
        "logs/adopt/{domain}/{system}/{seed}.log",
    wildcard_constraints:
        system=one_of(plan.params.imported),
    resources:
        mem_mb=lambda w, attempt: 1500 * attempt,
        runtime=lambda w, attempt: 60 * attempt,
    params:
        block=lambda w: plan.fit_params(w.domain, w.system),
        data="data/prepared/{domain}",
        out="runs/{domain}/{system}/{seed}",
    message:
        "adopt {wildcards.system} on {wildcards.domain}, seed {wildcards.seed}"
    shell:
        "anomed adopt {wildcards.system:q} --params {params.block:q} --seed {wildcards.seed} --data {params.data:q}"
        " --out {params.out:q} > {log:q} 2>&1"
