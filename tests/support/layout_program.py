"""The choice of layouts as an integer program, solved by HiGHS: another way to what elimination finds.

Variables, for part n, option k, value v and layouts a, b (see `smpc.codegen.rewrite.tensor_parallel.layout_problem`):

    s[n,k] = 1    n runs by option k                   sum over k of s[n,k] = 1
    z[v,a,b]      v, produced in layout a, is used in b: z[v,a,b] <= what produces v in a
                  for each user n of v: what uses v in b <= sum over a of z[v,a,b]
"""

import pulp

from smpc.codegen.rewrite.tensor_parallel.layouts import REPLICATED


def solve_program(problem):
    """The index of each part's option, proven to be the best; empty if nothing fits together."""
    program = pulp.LpProblem("layouts", pulp.LpMinimize)
    chosen, terms = {}, []
    for part, options in problem.options.items():
        row = [program.add_variable(f"s_{part}_{k}", cat=pulp.LpBinary) for k in range(len(options))]
        program += pulp.lpSum(row) == 1
        chosen[part] = row
        terms += [(x, problem.option_cost(part, option)) for x, option in zip(row, options, strict=True)]
    for producer, users in problem.users().items():
        terms += _conversions(program, problem, chosen, producer, users)
    scale = 1.0 / problem.weights.latency_bytes
    program.setObjective(pulp.LpAffineExpression([(x, cost * scale) for x, cost in terms if cost]))
    program.solve(pulp.HiGHS(msg=False, threads=1, gapRel=1e-7, gapAbs=1e-9, random_seed=0))
    status = program.solverModel.modelStatusToString(program.solverModel.getModelStatus())
    if status == "Infeasible":
        return {}
    assert status == "Optimal"
    return {part: max(range(len(row)), key=lambda k: row[k].varValue) for part, row in chosen.items()}


def _conversions(program, problem, chosen, producer, users):
    """Constrains the layouts in which one value is made and used; the costs of its conversions."""
    made = _by_layout(chosen[producer], [option.output for option in problem.options[producer]])
    needs = [
        _by_layout(chosen[user], [option.inputs[index] for option in problem.options[user]]) for user, index in users
    ]
    if producer in problem.returned:
        needs.append({REPLICATED: pulp.LpAffineExpression(constant=1)})
    terms = []
    for number, target in enumerate(dict.fromkeys(layout for need in needs for layout in need)):
        ways = [made[target]] if target in made else []
        for source, produced in made.items():
            cost = problem.conversion_cost(producer, source, target)
            if cost is not None and source != target:
                z = program.add_variable(f"z_{producer}_{number}_{len(ways)}", lowBound=0, upBound=1)
                program += z <= produced
                ways.append(z)
                terms.append((z, cost))
        for need in needs:
            if target in need:
                program += need[target] <= pulp.lpSum(ways)
    return terms


def _by_layout(row, layouts):
    found = {}
    for x, layout in zip(row, layouts, strict=True):
        found.setdefault(layout, []).append(x)
    return {layout: pulp.lpSum(variables) for layout, variables in found.items()}
