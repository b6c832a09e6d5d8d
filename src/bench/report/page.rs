//! The HTML around numbers and plots: head, tiles, tables, folded sections.
//!
//! Callers pass plain text, which is escaped here.

use std::fmt::Write as _;

use super::plot::{NARROW, Plot, STYLE, VARIABLES, WIDE, escape};

const CSS: &str = "*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif;\
font-variant-numeric:tabular-nums}:root{--page:#f4f6f8;--warn:#8a5200;--warn-bg:#fff4dc}\
@media (prefers-color-scheme:dark){:root{--page:#0e1317;--warn:#f0c070;--warn-bg:#2b2312}}\
header,main,footer{max-width:1280px;margin:0 auto;padding:0 28px}header{padding-top:26px}\
h1{font-size:25px;line-height:1.2;margin:0 0 4px;overflow-wrap:anywhere}h1 small{display:block;color:var(--s0);font-size:13px;\
font-weight:600;letter-spacing:.02em;margin-bottom:4px}h2{font-size:17px;margin:30px 0 2px}.note{color:var(--soft);font-size:13px;margin:0 0 8px}\
dl{display:flex;flex-wrap:wrap;gap:2px 22px;margin:6px 0 0;font-size:13px}dl div{display:flex;gap:6px;min-width:0}\
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}\
.warn{background:var(--warn-bg);color:var(--warn);border-radius:10px;padding:10px 16px;margin:16px 0 0}.warn ul{margin:0;padding-left:18px}.warn details{margin:4px 0 0;border:0;padding:0}.warn summary{font-weight:500;font-size:13px}\
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:18px 0 0}\
.tile,.card{background:var(--card);border:1px solid var(--line);border-radius:10px}.tile{padding:12px 16px}\
.tile b{display:block;font-size:23px;line-height:1.2;letter-spacing:-.01em;white-space:nowrap}.tile span{display:block;font-size:13px}\
.tile i{display:block;font-style:normal;font-size:12px;color:var(--soft)}\
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:16px;margin-top:10px}\
.card{padding:14px 14px 8px;min-width:0}.plot{display:block;width:100%;height:auto}.narrow{display:none}\
.scroll{overflow-x:auto;padding:4px 16px 8px;margin-top:10px}table{border-collapse:collapse;width:100%;font-size:14px}\
th,td{padding:7px 12px 7px 0;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}tr:last-child td{border:0}\
th{color:var(--soft);font-weight:500;font-size:13px}th:first-child,td:first-child{text-align:left;white-space:normal;min-width:min(160px,30vw)}\
details{margin-top:12px;border-top:1px solid var(--line);padding-top:10px}summary{cursor:pointer;font-weight:600}\
footer{color:var(--soft);font-size:12px;padding-top:26px;padding-bottom:30px}\
@media (max-width:600px){header,main,footer{padding-left:14px;padding-right:14px}header{padding-top:18px}h1{font-size:21px}\
.tiles{grid-template-columns:1fr 1fr;gap:8px}.tile{padding:10px 12px}.tile b{font-size:20px}.card{padding:10px 8px 6px}\
.scroll{padding:4px 12px 6px}.wide{display:none}.narrow{display:block}}";

const WARNINGS: usize = 4;

/// A number with name and note.
pub type Tile = (String, &'static str, String);

pub(super) struct Page {
    out: String,
}

impl Page {
    pub(super) fn new(title: &str) -> Self {
        Self::of("sluice bench", title)
    }

    pub(super) fn of(command: &str, title: &str) -> Self {
        let title = escape(title);
        let out = format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
             content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n\
             <title>{title} - {command}</title>\n<style>\n{VARIABLES}{STYLE}{CSS}\n</style>\n</head>\n<body>\n<header>\n\
             <h1><small>{command}</small>{title}</h1>\n"
        );
        Self { out }
    }

    pub(super) fn facts(&mut self, facts: &[(&str, String)]) {
        self.out.push_str("<dl>");
        for (name, value) in facts.iter().filter(|(_, value)| !value.is_empty()) {
            let _ = write!(self.out, "<div><dt>{name}</dt><dd>{}</dd></div>", escape(value));
        }
        self.out.push_str("</dl>\n");
    }

    pub(super) fn warnings(&mut self, warnings: &[String]) {
        if !warnings.is_empty() {
            self.out.push_str("<div class=\"warn\">");
            let (first, rest) = warnings.split_at(warnings.len().min(WARNINGS));
            self.list(first);
            if !rest.is_empty() {
                let _ = write!(self.out, "<details><summary>and {} more</summary>", rest.len());
                self.list(rest);
                self.out.push_str("</details>");
            }
            self.out.push_str("</div>\n");
        }
        self.out.push_str("</header>\n<main>\n");
    }

    fn list(&mut self, texts: &[String]) {
        self.out.push_str("<ul>");
        for text in texts {
            let _ = write!(self.out, "<li>{}</li>", escape(text));
        }
        self.out.push_str("</ul>");
    }

    pub(super) fn section(&mut self, title: String, note: &str) {
        let _ = writeln!(self.out, "<h2>{}</h2>", escape(&title));
        if !note.is_empty() {
            let _ = writeln!(self.out, "<p class=\"note\">{}</p>", escape(note));
        }
    }

    pub(super) fn tiles(&mut self, tiles: &[Tile]) {
        self.out.push_str("<div class=\"tiles\">");
        for (value, name, note) in tiles {
            let [value, name, note] = [value.as_str(), name, note].map(escape);
            let _ = write!(self.out, "<div class=\"tile\"><b>{value}</b><span>{name}</span><i>{note}</i></div>");
        }
        self.out.push_str("</div>\n");
    }

    pub(super) fn plots(&mut self, plots: &[Plot]) {
        self.out.push_str("<div class=\"plots\">\n");
        for plot in plots {
            let [wide, narrow] = [WIDE, NARROW].map(|size| plot.svg(size));
            let _ = writeln!(
                self.out,
                "<figure class=\"card\" style=\"margin:0\"><div class=\"wide\">{wide}</div><div class=\"narrow\">{narrow}</div></figure>"
            );
        }
        self.out.push_str("</div>\n");
    }

    pub(super) fn table(&mut self, rows: &[Vec<String>]) {
        self.out.push_str("<div class=\"card scroll\"><table>\n");
        for (number, row) in rows.iter().enumerate() {
            let cell = if number == 0 { "th" } else { "td" };
            self.out.push_str("<tr>");
            for text in row {
                let _ = write!(self.out, "<{cell}>{}</{cell}>", escape(text));
            }
            self.out.push_str("</tr>\n");
        }
        self.out.push_str("</table></div>\n");
    }

    pub(super) fn fold(&mut self, title: &str, inside: impl FnOnce(&mut Self)) {
        let _ = writeln!(self.out, "<details><summary>{}</summary>", escape(title));
        inside(self);
        self.out.push_str("</details>\n");
    }

    pub(super) fn end(mut self) -> String {
        if !self.out.contains("<main>") {
            self.out.push_str("</header>\n<main>\n");
        }
        self.out.push_str(
            "</main>\n<footer>TTFT: sent to first token. TPOT: (E2EL - TTFT) / (output tokens - 1). ITL: gaps between tokens. \
             E2EL: sent to last token. Percentiles from every value, linear between neighbours.</footer>\n</body>\n</html>\n",
        );
        self.out
    }
}
