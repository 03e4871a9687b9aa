# Scores -> tables (contract 5) and the page.


rule table:
    input:
        src=plan.code("table"),
        scores=[run.path("scores", ".json") for run in plan.runs],
        curves=ancient([run.path("scores", ".npz") for run in plan.runs]),
        runs=[run.path("runs", "/run.json") for run in plan.runs],
        models=plan.models,
        cards=expand(rules.images.output.card, domain=plan.domains),
    output:
        expand("results/{name}", name=TABLES),
    log:
        "logs/table.log",
    params:
        plan=plan.table_params(),
        upstream=plan.upstream(),
    message:
        "table"
    shell:
        "anomed table --plan {params.plan:q} > {log:q} 2>&1"


rule report:
    input:
        src=plan.code("report"),
        template="src/anomed/report/template.html",
        tables=rules.table.output,
        runs=rules.table.input.runs,
        models=rules.table.input.models,
        cards=rules.table.input.cards,
        data=ancient(
            expand(
                "data/prepared/{domain}/{name}",
                domain=plan.domains,
                name=["manifest.csv", "masks.npz", "native.zip"],
            )
        ),
    output:
        "results/report.html",
    log:
        "logs/report.log",
    params:
        plan=plan.table_params(),
    message:
        "report"
    shell:
        "anomed report --plan {params.plan:q} > {log:q} 2>&1"
