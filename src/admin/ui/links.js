// Addresses within the page. The fragment names a view or a thing, and how it is shown: #latency&span=hour, #request=ID,
// #engine=POOL/NAME, #key=NAME, #class=NAME, #latency&from=TIME&to=TIME. It has everything that a reload must not lose.

/** The view that shows a thing. */
const VIEW_OF = { request: "requests", engine: "engines", key: "keys", class: "latency" };

/** The parts of a fragment: `view` if it is named or follows, and the other parts by name. */
export function parse(fragment) {
  const place = {};
  for (const part of fragment.replace(/^#/, "").split("&").filter(Boolean)) {
    const at = part.indexOf("=");
    try {
      if (at < 0) place.view = decodeURIComponent(part); else place[part.slice(0, at)] = decodeURIComponent(part.slice(at + 1));
    } catch { /* Not an address of this page. */ }
  }
  const thing = Object.keys(VIEW_OF).find(name => place[name] !== undefined);
  return { ...place, view: place.view ?? VIEW_OF[thing] };
}

/** The fragment of a place, without the parts that are absent. */
export function link({ view, ...parts }) {
  const own = Object.entries(parts).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const named = own.some(([name]) => VIEW_OF[name] === view) ? [] : [view ?? []].flat();
  return "#" + [...named, ...own.map(([name, value]) => `${name}=${encodeURIComponent(value).replaceAll("%2F", "/").replaceAll("%3A", ":")}`)].join("&");
}

export const engineLink = (pool, name) => link({ engine: `${pool}/${name}` });
