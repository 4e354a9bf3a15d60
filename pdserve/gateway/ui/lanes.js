// Which row of the waterfall a request is drawn in: a free row in the group of its worker, kept while it is shown. Pure.

const SPACE_S = 0.15; // between two requests in one row

// `requests`: those shown, by arrival. `lanes`: key -> {group, lane} of the last call. Returns {lanes, groups}, with
// groups as [{name, rows}] in the order of their names; "" (not placed) comes first.
export function assignLanes(requests, lanes, groupOf, endOf) {
  const rowsOf = new Map();
  const next = new Map();
  const rowsIn = (group) => {
    if (!rowsOf.has(group)) rowsOf.set(group, []);
    return rowsOf.get(group);
  };
  const take = (request, group, lane) => {
    const rows = rowsIn(group);
    while (rows.length <= lane) rows.push([]);
    rows[lane].push([request.arrived_s, endOf(request)]);
    next.set(request.key, { group, lane });
  };
  const fresh = [];
  for (const request of requests) {
    const group = groupOf(request);
    const before = lanes.get(request.key);
    if (before && before.group === group) take(request, group, before.lane);
    else fresh.push([request, group]);
  }
  for (const [request, group] of fresh) {
    const rows = rowsIn(group);
    const [beginS, endS] = [request.arrived_s - SPACE_S, endOf(request) + SPACE_S];
    let lane = rows.findIndex((row) => row.every(([begin, end]) => end <= beginS || begin >= endS));
    if (lane < 0) lane = rows.length;
    take(request, group, lane);
  }
  const names = [...rowsOf.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  return { lanes: next, groups: names.map((name) => ({ name, rows: rowsOf.get(name).length })) };
}
