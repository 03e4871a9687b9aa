# Predictions -> scores (contract 4).


rule score:
    input:
        src=plan.code("score"),
        card=rules.images.output.card,
        data=ancient([rules.images.output.manifest, rules.images.output.masks]),
        run="runs/{domain}/{system}/{seed}/run.json",
        scores="runs/{domain}/{system}/{seed}/scores.csv",
    output:
        json="scores/{domain}/{system}/{seed}.json",
        curves="scores/{domain}/{system}/{seed}.npz",
    log:
        "logs/score/{domain}/{system}/{seed}.log",
    resources:
        mem_mb=lambda w, attempt: 1500 * attempt,
        runtime=lambda w, attempt: 60 * attempt,
    params:
        block=lambda w: plan.score_params(w.domain, w.system),
        device=lambda w, output: plan.params.run.device,
        data="data/prepared/{domain}",
        run="runs/{domain}/{system}/{seed}",
    message:
        "score {wildcards.system} on {wildcards.domain}, seed {wildcards.seed}"
    shell:
        "anomed score --run {params.run:q} --data {params.data:q} --params {params.block:q} --out {output.json:q}"
        " --device {params.device} > {log:q} 2>&1"
